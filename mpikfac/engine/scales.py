"""Eigenvalues of EKFAC: second moments of gradients in the eigenbases [George et al. 2018].

An example's gradient of a layer is `sum(g a^T)` over its positions. The mean squares over examples
of its elements in the basis of the eigenvectors of G and A, the scales, are the diagonal of its
second moment there. Of all matrices that are diagonal in that basis, that is the nearest one. The
products of the eigenvalues of G and A only estimate it, as if `a` and `g` were independent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import Grid
from mpikfac.engine.bases import Bases
from mpikfac.engine.factors import leave_out_broken, merge
from mpikfac.engine.nonfinite import Troubles
from mpikfac.layers import Layer
from mpikfac.numerics import Arena, all_finite
from mpikfac.plan import Plan, count_of, parent
from mpikfac.solvers import products_of_values, squares_in_bases

CHUNK = 2**20  # elements of vectors and gradients of the examples that are squared at once


class Scales:
    """The scales of the layers that are `rescaled`; those of other solvers than "ekfac" have none.

    They start as the products of the eigenvalues, whenever a layer's bases are new, with the weight
    that the factors' averages have then. Batches are merged into them as into these averages; that
    of the step that publishes new bases is lost, as it was recorded in the ones before.

    Attributes:
        averages: running averages `[outputs, inputs]`, by layer, which the bases' denominators are
            made of.
        weights: numbers of examples that they stand for.
        sums: this rank's sums over a batch, and numbers of examples; zero between steps.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        bases: Bases,
        dtype: torch.dtype,
        device: torch.device,
        troubles: Troubles,
    ) -> None:
        self.plan, self.grid, self.bases, self.troubles = plan, grid, bases, troubles
        self.averages = bases.scales = Arena(plan.scales(), dtype, device)
        weights = torch.zeros(len(self.averages), dtype=dtype, device=device)
        self.weights = dict(zip(self.averages, weights.split(1)))
        self.sums = Arena(plan.scale_sums(), dtype, device)
        self._messages = plan.reduce_scales(grid.world.rank)
        self.forget()

    def forget(self) -> None:
        """No scales, as there are no bases."""
        self.clear()
        self._recorded: set[str] = set()  # layers that have a basis, and so scales
        self._awaited: set[str] | None = None  # that will have new bases; None: as is said then

    def clear(self) -> None:
        """Forgets a batch's sums."""
        self.sums.flat.zero_()

    def record(self, layer: Layer, x: Tensor, g: Tensor, weight: float) -> None:
        """Adds a call's squares of examples' gradients, times `weight`.

        Calls of one pass count as if their gradients were independent.

        Args:
            x: inputs, `prepared`.
            g: gradients of the mean loss at the layer's outputs.
        """
        if layer.name not in self._recorded or not len(g):
            return
        vectors = self.bases.sides(layer.name, "vectors")
        outputs, inputs = layer.shape.gradient[-2:]
        vectors_each = g[0].numel() // outputs
        size = vectors_each * (outputs + inputs) + layer.shape.groups * outputs * inputs
        count = max(1, CHUNK // size)
        for some_x, some_g in zip(x.split(count), g.split(count)):
            total = squares_in_bases(*layer.pairs(some_x, some_g), *vectors)
            self.sums[layer.name].add_(total, alpha=weight)

    def unscale(self, scale: float) -> bool:
        """Takes a loss's scale out of a batch's sums; whether all are finite."""
        self.sums.flat.div_(scale).div_(scale)  # twice, as the square may be no number of its dtype
        return all_finite(self.sums.flat)

    def reduce(self, statistics: Mapping[str, Tensor], of_loss: bool) -> None:
        """Adds up a batch's sums over ranks.

        Collective over: world.

        Args:
            statistics: this rank's of the batch, beside which are numbers of examples.
            of_loss: gradients are those of the loss, a mean over the batch.
        """
        for name in self._recorded:
            count = statistics[count_of(self.plan.shapes[name].factors[0].name)]
            self.sums[name].mul_(count**2 if of_loss else 1)
            self.sums[count_of(name)].copy_(count)
        self.grid.exchange(self._messages, self.sums.flat)

    def merge(self, decay: float, step: int) -> None:
        """Takes a batch's sums over ranks into the averages."""
        if not self.averages:
            return
        self._check(step)
        for name, average in self.averages.items():
            total, count = self.sums[name], self.sums[count_of(name)]
            merge(average, self.weights[name], total, count, decay)
        self.clear()
        self.bases.rescaled()

    def restart(self, weights: Mapping[str, Tensor], share: int | None) -> None:
        """Starts anew where bases are new: in all layers, or in a `share` of them.

        Args:
            weights: of the factors' averages.
        """
        shares_of = self.plan.shares_of
        new, self._awaited = self._awaited, None
        if new is None:
            new = {n for n in self.averages if share in (None, shares_of[n])}
        for name in new:
            values = self.bases.sides(name, "values")
            products_of_values(*values, out=self.averages[name])
            of_factors = [weights[factor.name] for factor in self.plan.shapes[name].factors]
            self.weights[name].copy_(torch.stack(of_factors).amin(0))
        self._record_all()

    def items(self) -> dict[str, Tensor]:
        """Averages and weights, by the names of the state."""
        found = {f"scales/{name}": average for name, average in self.averages.items()}
        return found | {f"scale-weights/{name}": one for name, one in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Averages and weights, by name, if there are bases."""
        return dict(self.items()) if self.bases.ready else {}

    def complete(self, names: Collection[str]) -> set[str]:
        """Names of what all ranks together have in a state of `names`."""
        return set(self.needed(names))

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """What this rank takes from a state of `names`; each with a value of its kind."""
        return self.items() if "solver" in names else {}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Takes what is `needed` from the state of all, after `forget` and after bases have."""
        if "solver" not in names:
            return
        for name, value in self.items().items():
            value.copy_(state[name])
        self._record_all()
        # Bases on their way may be of one share only, and shares be dealt otherwise from here on.
        if "due" in names:
            begun = (name for name in names if name.startswith("decompositions/"))
            layers = {parent(parent(name.partition("/")[2])) for name in begun}
            self._awaited = layers.intersection(self.averages)

    def _record_all(self) -> None:
        """From now on, records the layers that have a basis."""
        self._recorded = {name for name, one in self.averages.items() if all_finite(one)}

    def _check(self, step: int) -> None:
        """Scales of this batch that are not finite count for nothing."""
        broken = leave_out_broken(self.sums, self.averages)
        mine = [name for name in broken if self.plan.updaters[name] == self.grid.world.rank]
        self.troubles.note("scales", mine, step, "their averages stay as they are")
