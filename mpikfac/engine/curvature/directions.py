"""Preconditioned gradients: computed by workers, sent to all ranks, and clipped."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine.curvature.bases import Bases
from mpikfac.engine.curvature.capture import Captured, Region
from mpikfac.engine.curvature.grafting import Stack, graft_of
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Item, Part
from mpikfac.engine.readers import slots_in
from mpikfac.layers import Layer
from mpikfac.model import groups_of
from mpikfac.numerics import copy_all, multiplying, together, usual_precision
from mpikfac.plan import PlannedLayer, stages
from mpikfac.plan.names import DAMPING, PRECONDITION, SEEN
from mpikfac.preconditioners import Held
from mpikfac.settings import Numbers, Settings


class Directions(Part):
    """Compute and hold the directions on this rank.

    Attributes:
        arena: directions by layer.
        slots: the layers with directions in the arena.
        graft: sets the lengths of directions.
        scale: the factor by which the clip scaled the last step's directions, `[1]`.
        expected: the change in the loss that the quadratic model predicts, `[1]`, for the layers
            whose directions this rank has.
    """

    def __init__(
        self,
        gradients: Gradients,
        bases: Bases,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Settings,
    ) -> None:
        super().__init__(gradients.site)
        self.gradients, self.bases, self.optimizer = gradients, bases, optimizer
        self.settings = settings
        self.arena = self.site.arena(self.plan.layouts.directions)
        self.slots = slots_in(self.arena, gradients.layers, self.site)
        self._layers = [layer for layer in gradients.layers if layer.name in self.arena]
        self._stacks = [self._place(layers, held) for layers, held in bases.stacks]
        self.graft = graft_of(settings.grafting, gradients, self._stacks, model, optimizer)
        usual = usual_precision(self.site.device, self.plan.strategy.refresh.staleness > 0)
        self._precision = settings.matmul_precision or usual
        self._run: Region = self._compute
        if settings.cuda_graph:
            self._run = Captured(self._compute, self._key, self.site.device)
        self._groups = groups_of(gradients.layers, optimizer)
        self._messages = stages.publish_directions(self.plan)
        self._clip_messages = stages.clip(self.plan)
        self.scale = self.arena.flat.new_ones(1)
        self.expected = self.arena.flat.new_zeros(1)

    def _place(self, layers: Sequence[PlannedLayer], held: Held) -> Stack:
        names, first = [layer.name for layer in layers], layers[0]
        preconditioner, matrix = (
            self.bases.preconditioners[first.preconditioner.name],
            first.shape.maps_vectors,
        )
        direction = together(self.arena, names)
        each = -1, *[1] * (direction.dim() - 1)
        return Stack(names, preconditioner, held, direction, matrix, first.shape.apart, each)

    def make(self, numbers: Numbers) -> None:
        """Precondition gradients, send the directions to all ranks, and clip the step.

        Collective over: row; also world if the step is clipped and no rank holds all directions.
        """
        self.precondition(numbers)
        self.publish()
        if numbers.bound is not None and self.gradients.layers:
            self._clip(numbers.bound)
        if self.settings.damping.adapted and self.graft.predicted:
            self._predict()

    def precondition(self, numbers: Numbers) -> None:
        """Precondition the gradients of the rank's layers, and set the lengths of directions."""
        with self.site.trace.stage(PRECONDITION), multiplying(self._precision):
            self.bases.damp(numbers.damping)
            self.graft.count()
            self._run(numbers)

    def _compute(self, numbers: Numbers) -> None:
        """Compute the directions of the rank's layers from averaged gradients, on the device.

        A gradient that is not finite results in a direction that is not finite, which is never
        used.
        """
        copy_all(self.graft.apart)
        self.graft.smooth(numbers.momentum)
        dtype, pairs = self.arena.flat.dtype, zip(self._stacks, self.graft.sources)
        self.graft.write(
            [stack.preconditioner.direction(x, stack.held).to(dtype) for stack, x in pairs]
        )

    def _key(self, numbers: Numbers) -> Hashable:
        """Return everything that `_compute` reads on the host."""
        return numbers.damping, numbers.momentum, *self.gradients.broken, self.graft.key()

    def publish(self) -> None:
        """Send directions to the ranks that lack them.

        Collective over: row.
        """
        self.site.grid.exchange(self._messages, self.arena.flat)

    def _clip(self, bound: float) -> None:
        """Bound the norm of the directions, or the Fisher norm of the directions or the step."""
        clip = self.settings.clip
        assert clip is not None, "the caller has checked that there is a bound"
        square = self._square() if clip.of_norm else self._along_gradient(2 if clip.of_step else 0)
        self.site.grid.exchange(self._clip_messages, square)
        self.scale = clip_scale(square, bound if clip.squared else bound**2)
        self.arena.flat *= self.scale

    def _predict(self) -> None:
        """Predict with K-FAC's quadratic model how the step changes the loss."""
        slope = self._along_gradient(1) / self.gradients.shortened
        self.expected = self.scale * self._along_gradient(2) / 2 - slope

    def descend(self, damping: float) -> None:
        """Apply the graft to the gradients in the model, once all directions are available.

        Collective over: world with a `QuadraticModel`, otherwise none.
        """
        expected = self.graft.descend(damping)
        if expected is not None:
            self.expected = expected

    def reduction_ratio(self, loss_before: float, loss_after: float) -> float | None:
        """Return the change in the mean loss over ranks, relative to the predicted change.

        Returns None if the prediction is 0.

        Collective over: world.
        """
        ranks = self.plan.grid.count
        # If every rank has the whole prediction, each one contributes an equal fraction of it.
        share = self.expected.item() / (1 if self.plan.owner_updates else ranks)
        change = (loss_after - loss_before) / ranks
        change, expected = summed(self.site.grid.world, [change, share])
        return change / expected if expected else None

    # -- state -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Discard the graft's averages and momenta, and the predicted change in the loss."""
        self.expected.zero_()
        for item in self.items():
            if item.tensor is not None:
                item.tensor.zero_()

    def items(self) -> Iterable[Item]:
        """Return the graft's averages and momenta, on which the lengths of directions depend."""
        return self.graft.items()

    def marks(self) -> dict[str, Any]:
        """Return the damping if it is adapted, and the first batch's vector counts, if known."""
        adapted, seen = self.settings.damping.adapted, self.settings.budget.text()
        return ({DAMPING: adapted.damping} if adapted else {}) | ({SEEN: seen} if seen else {})

    def in_state(self, names: Collection[str]) -> list[Item]:
        """Return the items whose kinds occur in `names`; all other items start from scratch."""
        kinds = {name.partition("/")[0] for name in names}
        return [item for item in self.items() if item.name.partition("/")[0] in kinds]

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with expected types and shapes."""
        marks = {name: value for name, value in self.marks().items() if name in names}
        return super().needed(names) | marks

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`."""
        super().load_state_dict(state, names)
        if self.settings.damping.adapted and DAMPING in names:
            self.settings.damping.adapted.damping = state[DAMPING]

    # -- details ---------------------------------------------------------------------------------

    def _along_gradient(self, power: int) -> Tensor:
        """Return `sum lr^power <direction, gradient>` `[1]` over the rank's layers."""
        sums, factors = [], []
        for layer in self._finite():
            products = self.arena[layer.name] * self.gradients.arena[layer.name]
            groups = self._groups[layer.name]
            parts = layer.parts(products) if len(set(groups)) > 1 else [products]
            sums += [part.sum() for part in parts]
            # Groups without a learning rate occur only with a power of 0.
            rates = [float(self.optimizer.param_groups[group].get("lr", 1)) for group in groups]
            factors += [rate**power for rate in rates[: len(parts)]]
        return weighted_sum(sums, factors, self.arena.flat)

    def _square(self) -> Tensor:
        """Return `sum <direction, direction>` `[1]` over the rank's layers."""
        squares = [self.arena[layer.name].square().sum() for layer in self._finite()]
        return weighted_sum(squares, [1.0] * len(squares), self.arena.flat)

    def _finite(self) -> list[Layer]:
        """Return the layers with directions in the arena and with finite gradients.

        Other layers are not updated, and would make the sums NaN.
        """
        broken = self.gradients.broken
        return [layer for layer in self._layers if layer.name not in broken]


def weighted_sum(numbers: Sequence[Tensor], weights: Sequence[float], like: Tensor) -> Tensor:
    """Return the weighted sum `[1]` of `numbers`, 0 if there are none, on the device of `like`."""
    if not numbers:
        return like.new_zeros(1)
    factors = torch.tensor(weights, dtype=like.dtype).to(like.device, non_blocking=True)
    return (torch.stack(list(numbers)) * factors).sum(0, keepdim=True)


def clip_scale(square: Tensor, bound: float) -> Tensor:
    """Return the multiplier `[1]` that keeps the square of a step's norm at or below `bound`.

    Args:
        square: the square of a norm, `[1]`, over layers: `sum <direction, direction>`, or the
            squared Fisher norm `sum <direction, gradient>`, times `lr^2` for the KL clip [SC20,
            eq. 18]. Rounding can make the squared Fisher norm negative.
    """
    return torch.sqrt(bound / square.abs()).clamp_(max=1.0)
