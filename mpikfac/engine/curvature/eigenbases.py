"""Adam's step in eigenbases of the moments of averaged gradients [SOAP]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.engine.curvature.grafting import AdamGraft, Stack
from mpikfac.engine.gradients import Gradients
from mpikfac.numerics import together
from mpikfac.plan import Grafting, lay_out
from mpikfac.plan.names import ROTATED
from mpikfac.preconditioners import damped_squares, turned_back


class EigenbasesGraft(AdamGraft):
    """Take Adam's step with momentum, in each layer's eigenbases.

    Momenta are stored in the basis of the weights. When bases change, averages of squares are not
    converted to the new bases. Uncovered parameters take Adam's step; its averages use the same
    decay.
    """

    KIND, DECAY = ROTATED, 0.95  # as published

    def __init__(
        self,
        grafting: Grafting,
        gradients: Gradients,
        stacks: Sequence[Stack],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(grafting, gradients, stacks, model, optimizer)
        names = [name for stack in stacks for name in stack.names]
        shapes = [(name, tuple(gradients.arena[name].shape)) for name in names]
        sizes = gradients.site.arena(lay_out([shapes]))
        self._sizes = [together(sizes, stack.names) for stack in stacks]
        places = slice(len(names))
        self._adam.gradients[places] = [sizes[name] for name in names]
        self._numerators[places] = [layer for stack in stacks for layer in _layers(stack)]

    def smooth(self, momentum: float) -> None:
        """Update the momenta, and the magnitudes of the gradients in eigenbases."""
        super().smooth(momentum)
        for stack, sizes in zip(self.stacks, self._sizes):
            gradient = _joined([self.gradients.arena[name] for name in stack.names])
            rotated = stack.preconditioner.direction(gradient, stack.held).to(sizes.dtype)
            _copy_finite(damped_squares(rotated, stack.held).sqrt(), sizes)

    def write(self, found: Sequence[Tensor]) -> None:
        """Write Adam's steps, computed from momenta in eigenbases, as directions."""
        for stack, rotated in zip(self.stacks, found):
            _copy_finite(rotated, stack.direction)
        super().write(found)

    def turned(self, found: Sequence[Tensor], steps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rotate Adam's steps back to the basis of the weights."""
        of_layers = iter(steps)
        in_bases = [_joined([*islice(of_layers, len(stack.names))]) for stack in self.stacks]
        pairs = zip(self.stacks, in_bases)
        return [turned_back(step, stack.held).to(step.dtype) for stack, step in pairs]


def _layers(stack: Stack) -> Sequence[Tensor]:
    """Return the directions of a stack's layers."""
    return stack.direction.unbind() if len(stack.names) > 1 else (stack.direction,)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a single tensor unchanged, or several tensors of equal shape as a stack."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0]


def _copy_finite(source: Tensor, out: Tensor) -> None:
    """Copy finite values to `out`; all others, which occur if bases are missing, become 0."""
    torch.nan_to_num(source, 0.0, 0.0, 0.0, out=out)
