"""Factors of the averaged gradient: made by owners, without hooks and messages.

R, in the place of A, is the running mean of `G' G`, and L, in the place of G, of `G G'`, where G is
the averaged gradient `[outputs, inputs]`. Everything behind the factors is as in K-FAC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpikfac.comm import summed
from mpikfac.engine import Factors, Gradients, Item, Part, Preconditioner, Recorder, Running, merge
from mpikfac.numerics import add_triangle, product
from mpikfac.plan import Factor, PlannedLayer
from mpikfac.plan.names import GRADIENT_FACTORS, GRADIENT_WEIGHTS, LEARNED
from mpikfac.settings import Numbers


class GradientFactors(Factors):
    """Running averages of the factors that the rank decomposes.

    A batch counts as one example: the weight of an average is `1 - decay^n` after n batches, so an
    average is without bias from the first batch on.
    """

    MARK = LEARNED

    def take(self, gradients: Gradients, decay: float) -> None:
        """Take the averaged gradients into the averages; gradients that are not finite count not.

        Collective over: none.
        """
        for layer in self.plan.layers:
            gradient = gradients.arena.get(layer.name)
            if gradient is not None and layer.name not in gradients.broken:
                merge(list(self._moments(layer, gradient)), decay)
        self.started, self.lacking = True, False

    def _moments(self, layer: PlannedLayer, gradient: Tensor) -> Iterator[Running]:
        """Yield the factors of a layer on the rank, with the moments of the gradient."""
        for side in layer.shape.sides:
            rows, start = gradient.mT if side == "A" else gradient, 0
            for factor in layer.side(side):
                name, stop = factor.name, start + factor.order
                if (average := self.averages.get(name)) is not None:
                    total = torch.zeros_like(average, dtype=gradient.dtype)
                    whole = len(layer.side(side)) == 1
                    add_triangle(total, moment(rows if whole else rows[..., start:stop, :], factor))
                    weight = self.weights[name]
                    yield Running(name, total, torch.ones_like(weight), average, weight)
                start = stop

    # -- state -----------------------------------------------------------------------------------

    def _items_of(self, factor: Factor) -> Iterator[Item]:
        yield Item(GRADIENT_FACTORS + factor.name, self.averages.get(factor.name))
        yield Item(GRADIENT_WEIGHTS + factor.name, self.weights.get(factor.name))

    def marks(self) -> dict[str, Any]:
        """Return whether any average has begun."""
        return {LEARNED: 1} if self.started else {}

    def _in_state(self, names: Collection[str]) -> Iterable[Factor]:
        """Return factors with averages in a state with `names`."""
        return [f for f in self.plan.factors if GRADIENT_FACTORS + f.name in names]

    def take_over(self, before: Factors) -> set[str]:
        """Take over the averages of layers that have the same factors as before.

        Collective over: world.
        """
        same = Part.take_over(self, before)
        (anew,) = summed(self.site.grid.world, [2 * len(self.averages) - len(same)])
        self.started, self.lacking = before.started, before.lacking or anew > 0
        return same


def moment(rows: Tensor, factor: Factor) -> Tensor:
    """Return `rows rows'` `[..., n, n]` in the form of a factor, of rows `[..., n, m]`."""
    if factor.order == 1:  # a diagonal, also of several groups
        return rows.square().sum(-1).reshape(-1, 1, 1)
    return product(rows, rows.mT)


class NoRecorder(Recorder):
    """No hooks and no statistics; `recording` tells whether the step makes new factors."""

    def __init__(self, model: Any, layers: Any, *further: Any) -> None:
        super().__init__(model, (), *further)

    def listen(self) -> None:
        """Make new factors in this step."""
        self.recording = True

    def rest(self) -> None:
        """Make no factors in this step."""
        self.recording = False


class OfGradient(Preconditioner):
    """The preconditioner of solvers whose factors come from the averaged gradient."""

    FACTORS: ClassVar[Mapping[str, type[Factors]]] = {"factors": GradientFactors}
    RECORDERS: ClassVar[Mapping[bool, type[Recorder]]] = dict.fromkeys((True, False), NoRecorder)
    factors: GradientFactors

    def collect(self) -> None:
        """Collect nothing of a part of a batch: the gradients' parts are enough."""

    def learn(self, numbers: Numbers) -> None:
        """Learn nothing from the batch before gradients are averaged; see `make_directions`."""

    def make_directions(self, numbers: Numbers) -> None:
        """Learn from averaged gradients, and precondition the gradients.

        Collective over: world and column.
        """
        super().learn(numbers)
        super().make_directions(numbers)

    def _average_statistics(self, numbers: Numbers) -> None:
        """Take the averaged gradients into the factors."""
        self.factors.take(self.gradients, numbers.decay)
        self.intact = False
