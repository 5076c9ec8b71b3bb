"""Methods: how a trainer turns averaged gradients into directions.

A `Method` takes steps with the model's current layers. A `MethodFactory` holds the user's
choices and creates the method, once at the start and again after each change of the trained
parameters. Both base classes implement first-order training, in which averaged gradients are the
directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpikfac.comm import SplitComm
from mpikfac.engine.extension import OneModel, exchange_of
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Part
from mpikfac.engine.site import Site
from mpikfac.engine.update import Everyone, update_of
from mpikfac.layers import Layer, Other, find_uncovered
from mpikfac.numerics import Scaler
from mpikfac.plan import Plan, Sharding, Split, Strategy, plan_for
from mpikfac.settings import Numbers, Schedule


class Method:
    """A method on one rank, with a hook for each stage of a step.

    Attributes:
        parts: the parts with a state, in the order in which they are reset.
        is_consistent: whether the rank's state is the state after the last step, without anything
            from a later step.
        outgrown: whether the batches so far require a new plan for the model.
    """

    parts: Sequence[Part] = ()

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.is_consistent = True
        self.outgrown = False

    @property
    def examples(self) -> int:
        """The number of examples recorded from the local batch."""
        return 0

    def numbers(self, step: int) -> Numbers:
        """Return the hyperparameters for a step."""
        return Numbers(step)

    def compared(self, numbers: Numbers) -> dict[str, object]:
        """Return the hyperparameters of a step that must be equal on all ranks."""
        return {}

    def begin_batch(self, step: int) -> None:
        """Begin the batch of a step, after the previous step."""
        self.is_consistent = True

    def begin_step(self, scaled: bool = False) -> None:
        """Begin a step, after the passes of its batch.

        Args:
            scaled: whether the loss was scaled by a `GradScaler`.

        Raises:
            ValueError: the method does not support a scaler, or needs a batch that was not passed.
        """

    def unscale(self, scaler: Scaler) -> bool:
        """Remove the loss scale from the recorded statistics; return whether all are finite."""
        return True

    def learn(self, numbers: Numbers) -> None:
        """Learn from the batch, for example by updating factors, before gradients are averaged.

        Collective over: world.
        """

    def direct(self, numbers: Numbers) -> None:
        """Turn averaged gradients into directions, and write them to the model.

        Collective over: world.
        """
        self.gradients.write(self.gradients.slots)
        self.is_consistent = False

    def abort_batch(self) -> None:
        """Drop the passes since the last step.

        Collective over: world with `overlap`, to complete the batch's messages; otherwise none.
        """
        for part in self.parts:
            part.abort_batch()

    def prepare_change(self) -> None:
        """Prepare for a change to the trained parameters, before the method is created again.

        Collective over: world.

        Raises:
            UserError: the trained parameters must not change.
        """

    def take_over(self, before: Any) -> None:
        """Copy everything that still applies from `before`, the method before the model changed.

        Collective over: world.
        """


@dataclass(frozen=True)
class CoveredModel:
    """A model's tensors, as covered by a method.

    Attributes:
        uncovered: the uncovered tensors and the votes.
        dtype: the dtype of statistics, gradients and directions.
        split: the split layers.
        sharding: the parameters of which the rank holds a shard.
    """

    layers: Sequence[Layer]
    uncovered: Sequence[Other]
    dtype: torch.dtype
    device: torch.device
    split: Split
    sharding: Sharding

    def of_uncovered(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[str]]:
        """Return names and shapes of uncovered tensors, and the names of running statistics."""
        shapes = [(block.name, tuple(block.tensor.shape)) for block in self.uncovered]
        return shapes, [block.name for block in self.uncovered if not block.parameters]


class MethodFactory:
    """The user's choices, from which the method for the model's current layers is created."""

    momentum: float | Schedule = 0.0
    """The momentum that the method applies to averaged gradients."""

    def choices(self) -> dict[str, object]:
        """Return the choices that must be equal on all ranks."""
        return {}

    def cover(self, model: nn.Module) -> tuple[list[Layer], list[Other]]:
        """Return the layers that the method covers, and the uncovered tensors."""
        return [], find_uncovered(model)

    def plan(
        self, model: CoveredModel, strategy: Strategy, optimizer: Optimizer, team: SplitComm
    ) -> Plan:
        """Plan the communication, and check that choices, ranks and optimizer are compatible.

        Raises:
            ValueError: choices, ranks and optimizer are not compatible.
        """
        shapes, means = model.of_uncovered()
        return plan_for(
            [],
            team.trains.size,
            strategy,
            shapes,
            itemsize=model.dtype.itemsize,
            means=means,
            split=model.split,
            sharding=model.sharding,
        )

    def build(
        self,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        plan: Plan,
    ) -> Method:
        """Return the method for the model's current layers."""
        return Method(gradients)

    def exchange(self, site: Site, gradients: Gradients) -> OneModel:
        """Return the object for exchanges between ranks other than reductions."""
        return exchange_of(site, gradients)

    def update(self, gradients: Gradients, exchange: OneModel) -> Everyone:
        """Return the object that clips and updates the model."""
        return update_of(gradients)
