"""Clip and update the model: each rank updates all of it, or each owner updates its blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.readers import Slot, slots_in
from mpikfac.model import Writes
from mpikfac.numerics import copy_all
from mpikfac.plan import lay_out, names, stages


class Everyone:
    """Base class for updates: every rank has all averaged gradients, and updates all blocks.

    Attributes:
        writes: detects weights that the program changes between steps, if the next step would
            overwrite them; None if such changes are kept.
    """

    writes: Writes | None = None

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.site, self.plan = gradients.site, gradients.plan

    def bound(self, max_norm: float) -> None:
        """Scale the averaged gradients down if their total norm is above `max_norm`.

        Collective over: world if the optimizer is sharded, otherwise none.
        """
        arena, slots = self.gradients.arena, self.gradients.slots
        scale = (float(max_norm) / (self._square().sqrt() + 1e-6)).clamp(max=1.0)
        self.gradients.shortened = scale.clamp(min=torch.finfo(scale.dtype).tiny)
        for slot in slots:
            if slot.block.parameters:
                arena[slot.block.name].mul_(scale)

    def _square(self) -> Tensor:
        """Return the squared norm of all averaged gradients that are finite, `[]`."""
        arena = self.gradients.arena
        squares = (arena[name].square().sum() for name in self._counted())
        return sum(squares, arena.flat.new_zeros(()))

    def _counted(self) -> list[str]:
        """Return the names of the blocks whose gradients this rank contributes to the norm."""
        slots, broken = self.gradients.slots, self.gradients.broken
        names = (slot.block.name for slot in slots if slot.block.parameters)
        return [name for name in names if name not in broken]

    def step(self, optimizer: Optimizer) -> None:
        """Update the model.

        Collective over: world if the optimizer is sharded, otherwise none.
        """
        self.gradients.counts.step()
        with self.site.trace.stage(names.OPTIMIZER):
            optimizer.step()

    def abort_batch(self) -> None:
        """Drop the reduced batch on all ranks, except for its votes.

        Compression errors and the state of a robust aggregation rule are discarded, because they
        can include the batch.

        Collective over: world.
        """
        gradients, grid = self.gradients, self.site.grid
        gradients.abort_batch()
        grid.reset()
        grid.combiner.reset()
        self._publish_votes()
        gradients.take_votes()

    def _publish_votes(self) -> None:
        """Send the reduced votes to ranks that lack them; in the base class, no rank lacks them."""


class ByOwners(Everyone):
    """Base class for updates in which only the rank that updates a block has its mean gradient."""

    def _square(self) -> Tensor:
        square = super()._square()
        return square.new_tensor(summed(self.site.grid.world, [float(square)])[0])

    def _counted(self) -> list[str]:
        updaters, rank = self.plan.updaters, self.plan.rank
        return [name for name in super()._counted() if updaters[name] == rank]


class ShardOwners(ByOwners):
    """Send each block's direction from its updater to the ranks that step the block's shards.

    The optimizer holds the state of the rank's shards.
    """

    def step(self, optimizer: Optimizer) -> None:
        """Send the directions of the rank's blocks, and step the rank's shards.

        Collective over: world.
        """
        self.gradients.reader.publish()
        super().step(optimizer)


class Owners(ByOwners):
    """Update each block on its updater, which then sends the weights to all ranks.

    The optimizer holds no state for blocks that other ranks update.
    """

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        site, arena = self.site, gradients.arena
        self._messages = stages.publish_weights(site.plan)
        # The weights before a step, if only changes are sent; 0 for blocks that are sent in full.
        changing = arena.layout if stages.publishes_changes(site.plan) else lay_out([])
        self._before = site.arena(changing)
        encoded = [block for block in gradients.blocks if block.name in site.plan.messages_of]
        self._changing = slots_in(self._before, encoded, site)
        trained = gradients.trained.by_name
        self.writes = Writes(trained) if trained else None

    def step(self, optimizer: Optimizer) -> None:
        """Update the rank's blocks, and send their weights to all ranks.

        Collective over: world.
        """
        for slot in self.gradients.slots:
            if not slot.steps:
                for parameter in slot.block.parameters:
                    parameter.grad = None
        copy_all(pair for s in self._changing for pair in s.block.values_to(s.parts))
        try:
            super().step(optimizer)
            self._publish()
        finally:  # also after an error: the step, not the program, has written the weights
            if self.writes is not None:
                self.writes.note()

    def _publish(self) -> None:
        flat, slots = self.gradients.arena.flat, self.gradients.slots
        copy_all(pair for s in slots if s.steps for pair in s.block.values_to(s.parts))
        if self._before:
            flat -= self._before.flat
        self.site.grid.exchange(self._messages, flat)
        if self._before:
            flat += self._before.flat
        copy_all(pair for s in slots if self._receives(s) for pair in s.block.values_from(s.parts))

    def _receives(self, slot: Slot) -> bool:
        """Return whether the rank copies a block's weights from the messages.

        If changes were encoded, the sender, too, uses the decoded changes.
        """
        return bool(self._before) or not slot.steps

    def _publish_votes(self) -> None:
        plain = [message for message in self._messages if not message.codec]
        self.site.grid.exchange(plain, self.gradients.arena.flat)


def update_of(gradients: Gradients) -> Everyone:
    """Return the update that the strategy selects."""
    if gradients.plan.sharding:
        return ShardOwners(gradients)
    kind = Owners if gradients.plan.strategy.assignment.shard_optimizer else Everyone
    return kind(gradients)
