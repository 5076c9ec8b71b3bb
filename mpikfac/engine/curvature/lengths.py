"""Lengths of directions: what preconditioning gives, or what a first-order method would step.

The choice `Length(source)` selects the length. A length may also take momentum of gradients before
they are preconditioned, and turn gradients of uncovered parameters into steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.engine.gradients import Gradients, Slot
from mpikfac.engine.part import Item
from mpikfac.model import members
from mpikfac.numerics import AdamSteps, Arena, copy_all, nesterov, orthogonalised
from mpikfac.plan import count_of, lay_out
from mpikfac.plan.names import GRAFT, MOMENTUM
from mpikfac.settings import Length
from mpikfac.solvers import Held, Solver


@dataclass(frozen=True)
class PlannedDirection:
    """A layer to precondition on the rank.

    Attributes:
        held: the layer's decompositions.
        gradient: the layer's gradient, a view of the gradients' arena.
        direction: the layer's direction, a view of the directions' arena.
        matrix: whether the layer maps vectors to vectors, and a direction has singular values.
    """

    name: str
    solver: Solver
    held: Held
    gradient: Tensor
    direction: Tensor
    matrix: bool


class Own:
    """The base of all lengths: the length that preconditioning gives.

    Attributes:
        planned: the layers to precondition on the rank.
        uncovered: the uncovered parameters with steps, which lie in the arena of gradients.
        predicted: whether K-FAC's quadratic model predicts the change of the loss.
    """

    predicted = True

    def __init__(
        self,
        length: Length,
        gradients: Gradients,
        planned: Sequence[PlannedDirection],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        self.length, self.gradients, self.planned = length, gradients, planned
        self.model, self.optimizer = model, optimizer
        self.uncovered: list[Slot] = []

    def batch(self, inputs: Tensor | tuple[Any, ...], loss: Any) -> None:
        """Take the rank's share of a batch, before the step.

        Raises:
            ValueError: the length needs no batch.
        """
        raise ValueError("length.batch(inputs, loss) needs length=Length('quadratic')")

    def begin_step(self) -> None:
        """Begin a step.

        Raises:
            ValueError: the length needs a batch.
        """

    def smoothed(self, momentum: float) -> Mapping[str, Tensor]:
        """Return the gradients to precondition in the place of the batch's, by name."""
        return {}

    def scale(self, smoothed: Mapping[str, Tensor]) -> None:
        """Give the rank's directions their lengths.

        Args:
            smoothed: the result of `smoothed`.
        """

    def descend(self, damping: float) -> Tensor | None:
        """Change the gradients in the model, once all directions are there.

        Returns:
            The predicted change of the loss of all ranks, `[1]`; None if nothing changes.

        Collective over: world with length="quadratic", else none.
        """

    def items(self) -> Iterable[Item]:
        """Return the tensors of the state of all ranks."""
        return ()


class OfGradients(Own):
    """The length of the layer's gradient [Agarwal et al. 2020]."""

    def scale(self, smoothed: Mapping[str, Tensor]) -> None:
        """Give directions the lengths of grafting; zeros stay zeros.

        The gradient replaces a direction that is not finite.
        """
        if not self.planned:
            return
        directions = [planned.direction for planned in self.planned]
        gradients = [smoothed.get(planned.name, planned.gradient) for planned in self.planned]
        lengths, of_gradients = norms(directions), norms(gradients)
        usable = lengths.isfinite()
        for direction, gradient, sound in zip(directions, gradients, usable):
            torch.where(sound, direction, gradient, out=direction)
        lengths = torch.where(usable, lengths, of_gradients)
        scales = torch.where(lengths > 0, self._lengths(of_gradients) / lengths, 1.0)
        torch._foreach_mul_(directions, list(scales))

    def _lengths(self, of_gradients: Tensor) -> Tensor:
        """Return the lengths of directions, `[directions]`."""
        return of_gradients


class OfAdam(OfGradients):
    """The length of Adam's step without momentum; uncovered parameters take Adam's step itself."""

    def __init__(
        self,
        length: Length,
        gradients: Gradients,
        planned: Sequence[PlannedDirection],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(length, gradients, planned, model, optimizer)
        slots = gradients.uncovered_slots
        self.uncovered = [slot for slot in slots if slot.block.parameters and slot.steps]
        layers = [each.name for each in planned]
        uncovered = [slot.block.name for slot in self.uncovered]
        self._of_layers = AdamSteps(gradients.arena, layers)
        self._of_uncovered = AdamSteps(gradients.arena, uncovered)
        parameters = {layer.name: layer.parameters for layer in gradients.layers}
        self._weights = [weight for name in layers for weight in parameters[name]]
        self._of_layer = _table([len(parameters[name]) for name in layers], gradients.site.device)
        names = [*layers, *uncovered] if length.momentum else []
        shapes = [(name, tuple(gradients.arena[name].shape)) for name in names]
        self._momenta: Arena = gradients.site.arena(lay_out([shapes]))

    def smoothed(self, momentum: float) -> dict[str, Tensor]:
        """Take gradients into the momenta; return means of gradients by Nesterov's momentum.

        Means begin with momenta of 0: the first steps of uncovered parameters are shorter than
        Adam's.
        """
        if not self._momenta:
            return {}
        broken = self.gradients.broken
        gradients = [self.gradients.arena[name] for name in self._momenta]
        means = dict(zip(self._momenta, torch._foreach_mul(gradients, 1 - momentum)))
        if sound := [name for name in means if name not in broken]:
            momenta = [self._momenta[name] for name in sound]
            nesterov([means[name] for name in sound], momenta, momentum)
        return means

    def scale(self, smoothed: Mapping[str, Tensor]) -> None:
        """Give directions the lengths of Adam's steps, and step uncovered parameters by Adam."""
        super().scale(smoothed)
        self._step_uncovered(smoothed)

    def _lengths(self, of_gradients: Tensor) -> Tensor:
        """Return the lengths of Adam's steps, at most `trust` times the norms of the weights.

        A layer whose weights are all 0 takes Adam's length, so that the layer can begin to learn.
        """
        lengths = norms(self._of_layers.take(self.gradients.broken))
        if math.isinf(self.length.trust):
            return lengths
        limits = self.length.trust * self._norms_of_weights(lengths.dtype)
        return torch.where(limits > 0, lengths.minimum(limits), lengths)

    def _norms_of_weights(self, dtype: torch.dtype) -> Tensor:
        """Return the norm of all weights of each planned layer, `[directions]`."""
        squares = norms([weight.detach() for weight in self._weights]).to(dtype).square()
        return torch.cat([squares, squares.new_zeros(1)])[self._of_layer].sum(1).sqrt()

    def _step_uncovered(self, smoothed: Mapping[str, Tensor]) -> None:
        """Turn gradients of uncovered parameters into Adam's steps, for the same learning rate.

        Parameters of another optimizer keep their gradients.
        """
        scaled = [smoothed[slot.block.name] for slot in self.uncovered] if smoothed else None
        steps = self._of_uncovered.take(self.gradients.broken, scaled)
        own = members(self.optimizer)
        pairs = zip(self.uncovered, steps)
        copy_all((s.parts[0], step) for s, step in pairs if s.block.parameters[0] in own)

    def items(self) -> Iterator[Item]:
        """Return the averages of squared gradients, and the momenta."""
        averages = {**self._of_layers, **self._of_uncovered}
        for block in self.gradients.blocks:
            if block.parameters:
                for name in (block.name, count_of(block.name)):
                    yield Item(GRAFT + name, averages.get(name))
                if self.length.momentum:
                    yield Item(MOMENTUM + block.name, self._momenta.get(block.name))


class Orthogonal(OfAdam):
    """The length of Adam's step, after all singular values of a direction are made about equal."""

    def scale(self, smoothed: Mapping[str, Tensor]) -> None:
        """Orthogonalise directions that are matrices [Muon], and give them Adam's lengths."""
        if matrices := [planned.direction for planned in self.planned if planned.matrix]:
            torch._foreach_copy_(matrices, orthogonalised(matrices))
        super().scale(smoothed)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of tensors, `[tensors]`."""
    return torch.stack(torch._foreach_norm(tensors))


def _table(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the places of consecutive groups of `counts` members as rows, filled up by the end.

    Sums over rows have one order on all devices; sums by `index_add_` have none on a GPU.
    """
    ends = list(itertools.accumulate(counts))
    most, end = max(counts, default=0), sum(counts)
    rows = [
        [*range(stop - count, stop), *[end] * (most - count)] for stop, count in zip(ends, counts)
    ]
    return torch.tensor(rows, dtype=torch.long, device=device).reshape(len(counts), most)


LENGTHS: Mapping[str, str] = {
    "own": "mpikfac.engine.curvature.lengths:Own",
    "sgd": "mpikfac.engine.curvature.lengths:OfGradients",
    "adam": "mpikfac.engine.curvature.lengths:OfAdam",
    "orthogonal": "mpikfac.engine.curvature.lengths:Orthogonal",
    "quadratic": "mpikfac.extensions.quadratic:Quadratic",
}
"""The places of lengths, by the choice `Length(source)`."""
