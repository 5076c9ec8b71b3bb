"""Factors of the averaged gradient, which their owners compute without hooks or messages.

A, also called R, is the running mean of `X' X`, and G, also called L, is the running mean of
`Y Y'`. The preconditioner computes X and Y from the averaged gradient `[outputs, inputs]`; see
`Preconditioner.squared`. All later stages are the same as in K-FAC.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpikfac.comm import summed
from mpikfac.engine.curvature.bases import Bases
from mpikfac.engine.curvature.distributed import DistributedPreconditioner
from mpikfac.engine.curvature.factors import Factors, Running, merge
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Item, Part
from mpikfac.numerics import add_triangle, product
from mpikfac.plan import Factor, PlannedLayer
from mpikfac.plan.names import GRADIENT_FACTORS, GRADIENT_WEIGHTS, LEARNED
from mpikfac.settings import Numbers


class GradientFactors(Factors):
    """Running averages of the factors that this rank decomposes.

    A batch counts as one example: the weight of an average is `1 - decay^n` after n batches, so
    averages are unbiased from the first batch on.
    """

    MARK = LEARNED

    def take(self, gradients: Gradients, bases: Bases, decay: float) -> None:
        """Update the averages with the averaged gradients, except those that are not finite.

        Collective over: none.
        """
        for layer in self.plan.layers:
            factors = [factor for factor in layer.factors if factor.name in self.averages]
            if factors and layer.name not in gradients.broken:
                held = bases.hold([layer]) if bases.ready else None
                preconditioner, gradient = (
                    bases.preconditioners[layer.preconditioner.name],
                    gradients.arena[layer.name],
                )
                x, y = preconditioner.squared(gradient, held)
                merge([*self._moments(layer, "A", x.mT), *self._moments(layer, "G", y)], decay)
        self.started, self.lacking = True, False

    def _moments(self, layer: PlannedLayer, side: str, rows: Tensor) -> Iterator[Running]:
        """Yield a side's factors on this rank, with the moments of `rows` `[..., n, m]`."""
        factors, start = layer.side(side), 0
        for factor in factors:
            name, stop = factor.name, start + factor.order
            if (average := self.averages.get(name)) is not None:
                total = torch.zeros_like(average, dtype=rows.dtype)
                block = rows[..., start:stop, :] if len(factors) > 1 else rows
                add_triangle(total, moment(block, factor))
                weight = self.weights[name]
                yield Running(name, total, torch.ones_like(weight), average, weight)
            start = stop

    # -- state -----------------------------------------------------------------------------------

    def _items_of(self, factor: Factor) -> Iterator[Item]:
        yield Item(GRADIENT_FACTORS + factor.name, self.averages.get(factor.name))
        yield Item(GRADIENT_WEIGHTS + factor.name, self.weights.get(factor.name))

    def marks(self) -> dict[str, Any]:
        """Return a mark if the averages include at least one batch, otherwise {}."""
        return {LEARNED: 1} if self.started else {}

    def _in_state(self, names: Collection[str]) -> Iterable[Factor]:
        """Return all factors if the state contains averages; a rank saves only its own factors."""
        return self.plan.factors if LEARNED in names else ()

    def take_over(self, before: Factors) -> set[str]:
        """Adopt the averages of layers whose factors are the same as before the model changed.

        Collective over: world.
        """
        same = Part.take_over(self, before)
        (anew,) = summed(self.site.grid.world, [2 * len(self.averages) - len(same)])
        self.started, self.lacking = before.started, before.lacking or anew > 0
        return same


def moment(rows: Tensor, factor: Factor) -> Tensor:
    """Return `rows rows'` `[..., n, n]` in the shape of `factor`, for `rows` `[..., n, m]`."""
    if factor.order == 1:  # a diagonal, possibly of several groups
        return rows.square().sum(-1).reshape(factor.block(2))
    return product(rows, rows.mT)


class OfGradient(DistributedPreconditioner):
    """Use preconditioners whose factors are computed from the averaged gradient."""

    FACTORS: ClassVar[Mapping[str, type[Factors]]] = {"factors": GradientFactors}
    factors: GradientFactors

    def accumulate(self) -> None:
        """Do nothing: parts of a batch contribute only gradients."""

    def learn(self, numbers: Numbers) -> None:
        """Do nothing before gradients are averaged; see `make_directions`."""

    def make_directions(self, numbers: Numbers) -> None:
        """Update the factors from averaged gradients, and precondition the gradients.

        Collective over: world and column.
        """
        super().learn(numbers)
        super().make_directions(numbers)

    def _average_statistics(self, numbers: Numbers) -> None:
        """Merge the averaged gradients into the factors."""
        self.factors.take(self.gradients, self.bases, numbers.decay)
        self.is_consistent = False
