"""Set the lengths of directions to those of preconditioned gradients or of a first-order step.

A graft can also apply momentum to gradients before they are preconditioned, and replace gradients
of uncovered parameters with steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Item
from mpikfac.engine.readers import Slot
from mpikfac.model import members
from mpikfac.numerics import AdamSteps, copy_all, nesterov, orthogonalised, together
from mpikfac.plan import (
    AdamGrafting,
    AdamInEigenbases,
    Grafting,
    NoGrafting,
    SGDGrafting,
    count_of,
    lay_out,
)
from mpikfac.plan.names import GRAFT, MOMENTUM
from mpikfac.preconditioners import Held, Preconditioner


@dataclass(frozen=True)
class Stack:
    """Layers of one kind and shape, preconditioned together; on a CPU, each is its own stack.

    Attributes:
        names: the names of the layers.
        held: the decompositions; for several layers, with a leading dimension `[layers]`.
        direction: the directions, a view of their arena: `[outputs, inputs]`, or `[layers, outputs,
            inputs]` for several layers.
        matrix: whether a layer maps vectors to vectors, so that a direction has singular values.
        apart: the sizes of the parts into which the smaller side is split; each part is
            orthogonalised separately.
        each: the shape that broadcasts one value per layer over a tensor of the stack.
    """

    names: Sequence[str]
    preconditioner: Preconditioner
    held: Held
    direction: Tensor
    matrix: bool
    apart: Sequence[int]
    each: Sequence[int]


class Graft:
    """Base class for grafts; it keeps the lengths of preconditioned gradients.

    Attributes:
        stacks: the layers that this rank preconditions.
        sources: the gradients to precondition, for each stack.
        apart: pairs for copying gradients to sources that are not views of the gradients' arena.
        uncovered: the uncovered parameters whose steps replace their gradients in the arena.
        predicted: whether K-FAC's quadratic model predicts the change in the loss.
    """

    predicted = True

    def __init__(
        self,
        grafting: Grafting,
        gradients: Gradients,
        stacks: Sequence[Stack],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        self.grafting, self.gradients, self.stacks = grafting, gradients, stacks
        self.model, self.optimizer = model, optimizer
        self.sources, self.apart = list[Tensor](), list[tuple[Tensor, Tensor]]()
        for stack in stacks:
            blocks = [gradients.arena[name] for name in stack.names]
            source = blocks[0] if len(blocks) == 1 else gradients.arena.stack(stack.names)
            if source is None:  # on a GPU with several ranks, if equal layers have different owners
                source = torch.stack(blocks)
                self.apart += zip(source, blocks)
            self.sources.append(source)
        self.uncovered: list[Slot] = []
        self._counts = [len(stack.names) for stack in stacks]

    def set_batch(self, inputs: Tensor | tuple[Any, ...], loss: Any) -> None:
        """Pass the local batch to the graft, before the step.

        Raises:
            ValueError: the graft does not need a batch.
        """
        raise ValueError("grafting.set_batch(inputs, loss) needs grafting=QuadraticModel()")

    def begin_step(self) -> None:
        """Begin a step.

        Raises:
            ValueError: the graft needs a batch, but `set_batch` was not called.
        """

    def count(self) -> None:
        """Count the step, on the host only, before gradients are used."""

    def key(self) -> Hashable:
        """Return what `smooth` and `write` read on the host in addition to their arguments."""
        return None

    def smooth(self, momentum: float) -> None:
        """Apply momentum to the `sources`."""

    def write(self, found: Sequence[Tensor]) -> None:
        """Write the rank's directions, with their lengths, to the arena of directions.

        The gradient replaces a direction that is not finite, such as the direction of a layer
        without decompositions.

        Args:
            found: the preconditioned gradients, for each stack.
        """
        usable = (self._norms(found) < math.inf).split(self._counts)  # False if NaN
        for stack, direction, source, sound in zip(self.stacks, found, self.sources, usable):
            torch.where(sound.view(stack.each), direction, source, out=stack.direction)

    def _scale(self, lengths: Tensor) -> None:
        """Set the lengths of the directions in the arena, `[layers]`; zeros stay zeros."""
        norms = self._norms([stack.direction for stack in self.stacks])
        scales = lengths / norms.clamp_min(torch.finfo(norms.dtype).tiny ** 0.5)
        for stack, scale in zip(self.stacks, scales.split(self._counts)):
            stack.direction.mul_(scale.view(stack.each))

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norm of every layer, `[layers]`, for one tensor per stack."""
        layers = [x.unbind() if n > 1 else (x,) for x, n in zip(tensors, self._counts)]
        return norms(list(itertools.chain(*layers)))

    def descend(self, damping: float) -> Tensor | None:
        """Change the gradients in the model, once all directions are available.

        Returns:
            The predicted change in the loss, summed over ranks, `[1]`; None if no gradients change.

        Collective over: world with a `QuadraticModel`, otherwise none.
        """

    def items(self) -> Iterable[Item]:
        """Return the tensors that belong to the state of all ranks."""
        return ()


class SGDGraft(Graft):
    """Give each direction the length of the layer's gradient [Agarwal et al. 2020]."""

    def write(self, found: Sequence[Tensor]) -> None:
        """Write directions with the lengths of the gradients."""
        super().write(found)
        self._scale(self._norms(self.sources))


class AdamGraft(Graft):
    """Give directions the length of Adam's step without momentum.

    Uncovered parameters take Adam's step itself.

    Attributes:
        KIND: the kind of the items that store the averages.
        DECAY: the decay of the averages of squared gradients.
    """

    KIND, DECAY = GRAFT, 0.999

    def __init__(
        self,
        grafting: Grafting,
        gradients: Gradients,
        stacks: Sequence[Stack],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(grafting, gradients, stacks, model, optimizer)
        slots = gradients.uncovered_slots
        self.uncovered = [slot for slot in slots if slot.block.parameters and slot.steps]
        layers = [name for stack in stacks for name in stack.names]
        uncovered, self._covered = [slot.block.name for slot in self.uncovered], len(layers)
        names = [*layers, *uncovered]
        self._trust = cast(AdamGrafting | AdamInEigenbases, grafting).max_trust_ratio
        self._adam = AdamSteps(gradients.arena, names, self.DECAY)
        own = {layer.name: layer for layer in gradients.layers if layer.name in layers}
        weights = {name: gradients.reader.weights(own[name]) for name in layers}
        self._weights = [*itertools.chain(*weights.values()), gradients.arena.flat.new_zeros(1)]
        self._of_layer = _table([len(weights[name]) for name in layers], gradients.site.device)
        shapes = [(name, tuple(gradients.arena[name].shape)) for name in names]
        layout = lay_out([shapes] if grafting.momentum else [])
        self._momenta, self._means = gradients.site.arena(layout), gradients.site.arena(layout)
        if grafting.momentum:
            self.sources, self.apart = [together(self._means, x.names) for x in stacks], []
        steps = gradients.arena | self._means  # the steps of uncovered parameters
        self._numerators = [gradients.arena[name] for name in layers]
        self._numerators += [steps[name] for name in uncovered]

    def count(self) -> None:
        """Count the batch in the weights of Adam's averages."""
        self._adam.count(self.gradients.broken)

    def key(self) -> Hashable:
        """Return whether divisors are equal, weights' addresses, and which blocks are stepped."""
        own, places = members(self.optimizer), [weight.data_ptr() for weight in self._weights]
        stepped = [slot.block.parameters[0] in own for slot in self.uncovered]
        return self._adam.even, *places, *stepped

    def smooth(self, momentum: float) -> None:
        """Update the momenta; the sources become averages with Nesterov momentum.

        Momenta start at 0, so the first steps of uncovered parameters are shorter than Adam's.
        """
        if not self._momenta:
            return
        broken, means = self.gradients.broken, list(self._means.values())
        torch._foreach_copy_(means, [self.gradients.arena[name] for name in self._means])
        torch._foreach_mul_(means, 1 - momentum)
        if sound := [name for name in self._means if name not in broken]:
            momenta = [self._momenta[name] for name in sound]
            nesterov([self._means[name] for name in sound], momenta, momentum)

    def write(self, found: Sequence[Tensor]) -> None:
        """Write directions with the lengths of Adam's steps, and steps for uncovered parameters.

        Lengths are at most `max_trust_ratio` times the norm of the layer's weights; there is no
        limit if the weights are all 0, so that the layer can start learning. Parameters that
        another optimizer updates keep their gradients.
        """
        steps = self._adam.take(self._numerators)
        super().write(self.turned(found, steps))
        if self.stacks:
            both = norms([*steps[: self._covered], *(x.detach() for x in self._weights)])
            lengths, of_weights = both[: self._covered], both[self._covered :]
            limits = self._trust * of_weights[self._of_layer].norm(dim=1)
            self._scale(torch.where(limits > 0, lengths.minimum(limits), lengths))
        own, pairs = members(self.optimizer), zip(self.uncovered, steps[self._covered :])
        copy_all((s.parts[0], step) for s, step in pairs if s.block.parameters[0] in own)

    def turned(self, found: Sequence[Tensor], steps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the directions for each stack; `write` sets their lengths.

        Args:
            found: the preconditioned gradients, for each stack.
            steps: Adam's steps, for each layer.
        """
        return found

    def items(self) -> Iterator[Item]:
        """Return the averages of squared gradients, and the momenta."""
        for block in self.gradients.blocks:
            if block.parameters:
                for name in (block.name, count_of(block.name)):
                    yield Item(self.KIND + name, self._adam.get(name))
                if self.grafting.momentum:
                    yield Item(MOMENTUM + block.name, self._momenta.get(block.name))


class OrthogonalGraft(AdamGraft):
    """Orthogonalise directions, and give them the length of Adam's step."""

    def turned(self, found: Sequence[Tensor], steps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Orthogonalise directions that are matrices [Muon], block by block if they are large."""
        pairs = [(stack, one) for stack, one in zip(self.stacks, found) if stack.matrix]
        dims = [-2 if one.shape[-2] <= one.shape[-1] else -1 for _, one in pairs]
        parts = [one.split(stack.apart, dim) for (stack, one), dim in zip(pairs, dims)]
        turned = iter(orthogonalised(list(itertools.chain(*parts))))
        joined = iter(
            [
                torch.cat([next(turned) for _ in each], dim) if len(each) > 1 else next(turned)
                for each, dim in zip(parts, dims)
            ]
        )
        return [next(joined) if s.matrix else one for s, one in zip(self.stacks, found)]


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, `[tensors]`."""
    return torch.stack(torch._foreach_norm(tensors)) if tensors else torch.zeros(0)


def _table(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return one row of indices per group of consecutive items; `counts` are the groups' sizes.

    Rows are padded with the total number of items. A sum along rows has the same order on all
    devices, whereas `index_add_` has no fixed order on a GPU.
    """
    ends = list(itertools.accumulate(counts))
    most, end = max(counts, default=0), sum(counts)
    rows = [
        [*range(stop - count, stop), *[end] * (most - count)] for stop, count in zip(ends, counts)
    ]
    return torch.tensor(rows, dtype=torch.long, device=device).reshape(len(counts), most)


def graft_of(grafting: Grafting, *parts: Any) -> Graft:
    """Return the graft for a `grafting` setting.

    Args:
        parts: the arguments of `Graft` after the first.
    """
    match grafting:
        case NoGrafting():
            return Graft(grafting, *parts)
        case SGDGrafting():
            return SGDGraft(grafting, *parts)
        case AdamInEigenbases():
            from mpikfac.engine.curvature.eigenbases import EigenbasesGraft

            return EigenbasesGraft(grafting, *parts)
        case AdamGrafting(normalize_rows=True):
            from mpikfac.engine.curvature.rows import RowsGraft

            return RowsGraft(grafting, *parts)
        case AdamGrafting():
            return (OrthogonalGraft if grafting.orthogonalize else AdamGraft)(grafting, *parts)
    attached: Graft = grafting.attach(*parts)
    return attached
