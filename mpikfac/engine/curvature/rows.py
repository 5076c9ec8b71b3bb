"""Orthogonal directions whose rows have approximately equal lengths [NorMuon]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn, where
from torch.optim import Optimizer

from mpikfac.engine.curvature.grafting import OrthogonalGraft, Stack
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Item
from mpikfac.numerics import together
from mpikfac.plan import Grafting, lay_out
from mpikfac.plan.names import ROWS

DECAY, EPSILON = 0.95, 1e-10  # as published


class RowsGraft(OrthogonalGraft):
    """Normalise the rows of orthogonal directions, and give them the length of Adam's step.

    A row is divided by the root of a running average of its mean square. All averages start at 0
    together, and the length of the direction is set afterwards, so their bias need not be
    corrected.
    """

    def __init__(
        self,
        grafting: Grafting,
        gradients: Gradients,
        stacks: Sequence[Stack],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(grafting, gradients, stacks, model, optimizer)
        names = [name for stack in stacks if stack.matrix for name in stack.names]
        shapes = [(name, tuple(gradients.arena[name].shape[:-1])) for name in names]
        self._squares = gradients.site.arena(lay_out([shapes]))

    def turned(self, found: Sequence[Tensor], steps: Sequence[Tensor]) -> Sequence[Tensor]:
        """Orthogonalise directions that are matrices, and normalise their rows."""
        pairs = zip(self.stacks, super().turned(found, steps))
        return [self._divided(stack, polar) if stack.matrix else polar for stack, polar in pairs]

    def _divided(self, stack: Stack, polar: Tensor) -> Tensor:
        """Merge the rows' mean squares into the averages, and return the normalised rows.

        A direction that is not finite does not change the averages.
        """
        averages, squares = together(self._squares, stack.names), polar.square().mean(-1)
        averages.copy_(where(squares.isfinite(), averages.lerp(squares, 1 - DECAY), averages))
        return polar / averages.sqrt().add_(EPSILON)[..., None]

    def items(self) -> Iterator[Item]:
        """Return the items of `OrthogonalGraft`, and the averages of the rows' mean squares."""
        yield from super().items()
        for layer in self.gradients.layers:
            if layer.shape.maps_vectors:
                yield Item(ROWS + layer.name, self._squares.get(layer.name))
