"""Reduce an arena over ranks: in one call, part by part in a fixed order, or overlapped.

The strategy selects the sender; the code that fills an arena is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpikfac.numerics import Arena, Parts
from mpikfac.plan import Message

if TYPE_CHECKING:
    from mpikfac.comm.grid import Grid

Turns = Mapping[Any, Sequence[Message]]
"""The messages of an arena, by slot of a refresh; the key None stands for all layers."""


class Sender:
    """Reduce an arena when the step requests it.

    Attributes:
        arena: the local values and, after `add_up`, their sums or means over ranks.
        early: whether blocks are sent during the backward pass, as soon as they are ready.
        in_parts: whether a batch arrives in parts, through `accumulate`.
        alone: whether the sums cover only this rank's replica of the model.
    """

    early = False
    in_parts = False

    def __init__(
        self, grid: Grid, arena: Arena, messages: Turns, divided: Sequence[Tensor] = ()
    ) -> None:
        """Hold an arena, whose content can change until `add_up`.

        Args:
            divided: views of the arena that receive means over ranks instead of sums.
        """
        self.grid, self.arena, self.messages = grid, arena, messages
        self.divided = list(divided)
        self.alone = False

    @property
    def accumulated(self) -> Tensor:
        """The values of the local batch so far, `[..., size of the arena]`."""
        return self.arena.flat

    @property
    def nbytes(self) -> int:
        """The number of bytes stored in addition to the arena."""
        return 0

    def ready(self, *names: str) -> None:
        """Mark blocks of the arena as complete.

        Collective over: none.
        """

    def is_ready(self, name: str) -> bool:
        """Return whether a block was marked as complete; only early senders keep track."""
        return False

    def accumulate(self) -> None:
        """Store the content of the arena as one part of the local batch.

        Raises:
            ValueError: this sender does not accept batches in parts.
        """
        raise ValueError("accumulate() needs transport.virtual_ranks; without it, call only step()")

    def add_up(self, turn: int | None = None) -> None:
        """Reduce the arena over ranks.

        Args:
            turn: the slot of the refresh whose messages are sent; None: the messages of all layers.

        Collective over: world.

        Raises:
            ValueError: parts of the batch are missing.
        """
        if self.divided and self.grid.world.size > 1:
            torch._foreach_div_(self.divided, self.grid.world.size)
        self.grid.exchange(self.messages[turn], self.arena.flat)

    def abort_batch(self) -> None:
        """Drop the sender's data for a batch that no step will use.

        Collective over: world if the sender is early, otherwise none.
        """


class Overlapped(Sender):
    """Send blocks during computation, each as soon as it is ready."""

    early = True

    def __init__(
        self,
        grid: Grid,
        arena: Arena,
        messages: Turns,
        divided: Sequence[Tensor] = (),
        urgency: int = 0,
    ) -> None:
        """Start the grid's sending thread, unless it runs already.

        Messages of arenas with a lower `urgency` are sent first.
        """
        super().__init__(grid, arena, messages, divided)
        self._sums = grid.overlapped(messages[None], arena.layout, arena.flat, urgency)

    def is_ready(self, name: str) -> bool:
        """Return whether a block was marked as ready since the last `add_up`."""
        return name in self._sums.ready_blocks

    def ready(self, *names: str) -> None:
        """Send blocks, whose values must not change until `add_up` returns.

        Raises:
            RuntimeError: a block was already ready.
        """
        for name in names:
            if self.divided:
                self.arena[name] /= self.grid.world.size
            self._sums.ready(name)

    def add_up(self, turn: int | None = None) -> None:
        """Wait for the reductions; all blocks must be ready."""
        self._sums.wait()

    def abort_batch(self) -> None:
        """Complete the messages of a batch that no step will use."""
        self._sums.abort_batch(self.grid.world)


class InOrder(Sender):
    """Sum the parts of a batch in a fixed order, regardless of which rank computed each part."""

    in_parts = True

    def __init__(
        self,
        grid: Grid,
        arena: Arena,
        messages: Turns,
        divided: Sequence[Tensor] = (),
        *,
        count: int,
        stage: str,
    ) -> None:
        """Allocate memory for the `count` parts of the local batch."""
        super().__init__(grid, arena, messages, divided)
        self._parts, self._stage = Parts(arena, count), stage

    @property
    def accumulated(self) -> Tensor:
        """The parts so far, `[parts, size of the arena]`."""
        return self._parts.accumulated

    @property
    def nbytes(self) -> int:
        """The number of bytes that the parts take."""
        return self._parts.nbytes

    def accumulate(self) -> None:
        """Store the content of the arena as the next part.

        Raises:
            ValueError: all parts have already arrived.
        """
        self._parts.add()

    def add_up(self, turn: int | None = None) -> None:
        """Sum the parts of all ranks, in order.

        Raises:
            ValueError: parts are missing.
        """
        self.grid.sum_in_order(self._parts.take(), self.arena.flat, self._stage)
        if self.divided:
            torch._foreach_div_(self.divided, len(self._parts) * self.grid.world.size)

    def abort_batch(self) -> None:
        """Drop the parts of the current batch that `accumulate` has stored."""
        self._parts.clear()
