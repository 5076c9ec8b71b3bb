"""EKFAC's eigenvalues: second moments of gradients in the eigenbases [George et al. 2018].

An example's gradient of a layer is `sum(g a^T)` over positions. If it is rotated into the
eigenbases of G and A, the mean squares of its elements over examples are the scales. They are the
diagonal of the gradient's second moment in the eigenbasis, and therefore its best diagonal
approximation. The products of the eigenvalues of G and A only estimate them, as if `a` and `g` were
independent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mpikfac.engine.curvature.bases import Bases
from mpikfac.engine.curvature.factors import Running, leave_out_broken, merge
from mpikfac.engine.part import Item, PreconditionerPart
from mpikfac.layers import Layer
from mpikfac.numerics import all_finite, products_of_values, squares_in_bases
from mpikfac.plan import count_of, scales
from mpikfac.plan.names import DECOMPOSITIONS, DUE, PRECONDITIONER, SCALE_WEIGHTS, SCALES

CHUNK = 2**20  # how many elements of vectors and gradients to square at once


class Scales(PreconditionerPart):
    """The scales (estimated eigenvalues) of the layers whose preconditioners use them.

    Whenever a layer gets new bases, its scales start as products of eigenvalues, with the weight
    of the factors' averages. Batches are merged into scales in the same way as into the factors'
    averages. The batch of a step with new bases is lost, because it was recorded in the previous
    bases.

    Attributes:
        averages: running averages `[outputs, inputs]`, by layer, used by directions.
        weights: the numbers of examples in the averages.
        sums: the rank's sums over a batch, and their numbers of examples; zero between steps.
    """

    MARK = PRECONDITIONER

    def __init__(self, bases: Bases) -> None:
        super().__init__(bases.site)
        site, self.bases = bases.site, bases
        self.averages = bases.scales
        weights = torch.zeros(len(self.averages), dtype=site.dtype, device=site.device)
        self.weights = dict(zip(self.averages, weights.split(1)))
        self.sums = site.arena(scales.layout_of_sums(site.plan))
        self._layers = {layer.name: layer for layer in site.plan.rescaled}
        self._running = {name: self._running_of(name) for name in self.averages}
        self._messages = scales.reduce_scales(site.plan)
        self._recorded: set[str] = set()  # layers that have bases, and therefore scales
        self._awaited: set[str] | None = None  # layers with pending bases in a loaded state

    def _running_of(self, name: str) -> Running:
        total, count = self.sums[name], self.sums[count_of(name)]
        return Running(name, total, count, self.averages[name], self.weights[name])

    def reset(self) -> None:
        """Discard all scales; they restart with new bases."""
        self._recorded, self._awaited = set(), None

    def abort_batch(self) -> None:
        """Drop a batch's sums."""
        self.sums.flat.zero_()

    def record(self, layer: Layer, x: Tensor, g: Tensor, weight: float) -> None:
        """Add a call's squared per-example gradients in the eigenbases, times `weight`.

        Several calls in a pass are treated as if their gradients were independent.

        Args:
            layer: the layer; with a `group`, only that group was called.
            x: the inputs, after `prepared`.
            g: the gradients of the mean loss with respect to the layer's outputs.
        """
        if layer.name not in self._recorded or not len(g):
            return
        of_inputs, of_outputs = self.bases.sides(layer.name, "vectors")
        sums = self.sums[layer.name]
        if (group := layer.group) is not None:
            of_inputs, of_outputs = ([q[group] for q in side] for side in (of_inputs, of_outputs))
            sums = sums[group]
        outputs, inputs = layer.shape.gradient[-2:]
        vectors_each = g[0].numel() // outputs
        size = vectors_each * (outputs + inputs) + layer.shape.groups * outputs * inputs
        count = max(1, CHUNK // size)
        for inputs_of, gradients_of in zip(x.split(count), g.split(count)):
            total = squares_in_bases(*layer.pairs(inputs_of, gradients_of), of_inputs, of_outputs)
            sums.add_(total, alpha=weight)

    def drop_layer(self, name: str) -> None:
        """Drop the sums that the current batch has accumulated for a layer."""
        if name in self.averages:
            self.sums[name].zero_()

    def unscale(self, scale: float) -> bool:
        """Divide a batch's sums by the loss scale; return whether all sums are finite."""
        self.sums.flat.div_(scale).div_(scale)  # divided twice, because the square can overflow
        return all_finite(self.sums.flat)

    def reduce(self, statistics: Mapping[str, Tensor], of_loss: bool, weight: float) -> None:
        """Reduce a batch's sums over ranks.

        Collective over: world.

        Args:
            statistics: the rank's sums for factors, and their numbers of examples.
            of_loss: whether the gradients are gradients of the loss, which is a mean over the
                batch.
            weight: the weight of the rank's examples.
        """
        for name in self._recorded:
            count, running = statistics[self._layers[name].factors[0].counted], self._running[name]
            running.total.mul_(count**2 * weight if of_loss else weight)
            running.count.copy_(count * weight)
        self.site.grid.exchange(self._messages, self.sums.flat)

    def merge(self, decay: float, step: int) -> None:
        """Merge a batch's reduced sums into the averages."""
        if not self.averages:
            return
        self._check(step)
        merge(list(self._running.values()), decay)
        self.sums.flat.zero_()
        self.bases.rescaled()

    def restart(self, weights: Mapping[str, Tensor], turn: int | None) -> None:
        """Restart the scales of layers with new bases.

        Args:
            weights: the weights of the factors' averages, by factor.
            turn: the slot of the refresh whose layers have new bases; None for all layers.
        """
        names, self._awaited = self._awaited, None
        if names is None:
            names = {x.name for x in self._layers.values() if turn in (None, x.turn)}
        for name in names:
            values = self.bases.sides(name, "values")
            products_of_values(*values, out=self.averages[name])
            of_factors = [weights[factor.name] for factor in self._layers[name].factors]
            self.weights[name].copy_(torch.stack(of_factors).amin(0))
        self._record_all()

    def items(self) -> Iterator[Item]:
        """Return averages and weights."""
        for name in self.averages:
            yield Item(SCALES + name, self.averages[name])
            yield Item(SCALE_WEIGHTS + name, self.weights[name])

    def state_dict(self) -> dict[str, Any]:
        """Return averages and weights, by name, if there are bases."""
        if not self.bases.ready:
            return {}
        return {item.name: item.tensor for item in self.items()}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset` and after the bases.

        Collective over: world.
        """
        if self.MARK not in names:
            return
        super().load_state_dict(state, names)
        self._record_all()
        # Pending bases can be those of a single slot, and layers can now belong to different
        # slots.
        if DUE in names:
            begun = {
                DECOMPOSITIONS + block.name: layer.name
                for layer in self._layers.values()
                for factor in layer.factors
                for block in factor.blocks
            }
            own = [begun[name] for name in names if name in begun]  # each rank has its own part
            self._awaited = set(chain(*self.site.grid.world.allgather(own)))

    def _record_all(self) -> None:
        """From now on, record the layers that have bases."""
        self._recorded = {name for name, scales in self.averages.items() if all_finite(scales)}

    def _check(self, step: int) -> None:
        """Exclude the batch's scales with NaN or infinity from the averages."""

        def report(broken: list[str]) -> None:
            answered = [name for name in broken if self.plan.updaters[name] == self.plan.rank]
            self.site.nonfinite.note("scales", answered, step, "their averages do not change")

        leave_out_broken(self.sums.flat, list(self._running.values()), self.site.flags, report)
