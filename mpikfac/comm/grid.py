"""Arrange the ranks in a grid, and execute collectives on arenas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from mpikfac.comm.job import check_nodes, cuda_aware
from mpikfac.comm.messages import (
    COPIES,
    PRIMITIVES,
    SUMS,
    Buffers,
    Combiner,
    Encoded,
    OverlappedSums,
    ProgressThread,
    check_sendable,
    check_summable,
    sent_elements,
    sum_in_order,
)
from mpikfac.comm.mpi import MPI
from mpikfac.comm.process_group import ProcessGroupComm
from mpikfac.errors import UserError
from mpikfac.plan import BETWEEN_NODES, IN_NODE, PASSED, Layout, Message, TensorParallelPlan
from mpikfac.trace import Trace


class Grid:
    """Arrange the ranks in `rows` x `columns`, with a communicator per column and per row.

    Rank r is in row `r // columns` and column `r % columns`. With split layers, there are also
    communicators for tensor-parallel groups and for peers, which hold the same slices.

    Collective over: world.

    Attributes:
        world: the communicator of all ranks; statistics and gradients are reduced over it.
        column: the communicator of this rank's column, the gradient workers of a set of layers;
            decompositions are published to them.
        row: the communicator of this rank's row, with one rank from every column; preconditioned
            gradients are published to them.
        encoded: sends compressed messages, and keeps the compression errors.
        combiner: aggregates the vectors of all ranks with a robust rule, and keeps its state.

    Raises:
        UserError: ranks are not on the same node although `ranks_per_node` requires it, or MPI has
            run out of communicators (MPICH allows 2,048 per process).
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        rows: int,
        trace: Trace,
        ranks_per_node: int | None = None,
        tp_plan: TensorParallelPlan | None = None,
    ) -> None:
        try:
            self._teams = _communicators(comm, rows, ranks_per_node, tp_plan)
        except MPI.Exception as error:
            why = str(error).splitlines()[-1]
            raise UserError(
                f"MPI cannot create a communicator: {why}; "
                "call close() on trainers that you have finished with"
            ) from error
        self.world, self.column, self.row = (self._teams[n] for n in ("world", "column", "row"))
        self._progress: dict[str, ProgressThread] = {}
        self.trace = trace
        self.combiner, self.encoded, self._buffers = _senders(trace, self.world)

    def apart(self) -> Grid:
        """Return a grid with the same communicators, but separate message state.

        Messages sent through the new grid affect neither the trace nor the compression errors of
        this one. Waits until this grid's overlapped messages are sent.
        """
        for thread in self._progress.values():
            thread.flush()
        apart = copy.copy(self)
        apart.trace = Trace()
        apart.combiner, apart.encoded, apart._buffers = _senders(apart.trace, self.world)
        return apart

    @property
    def communicators(self) -> list[MPI.Intracomm]:
        """All communicators of the grid."""
        return [*self._teams.values(), *(thread.comm for thread in self._progress.values())]

    def exchange(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Exchange the messages' spans of `flat`, message by message.

        After a reduction, the sums over all ranks are on every rank, on the message's root or, part
        by part, on the members of the communicator. After a gather, every rank holds the owner's
        values; if they were compressed, the owner, too, gets the decoded values. Elements that a
        rank neither owns nor receives are undefined.

        Collective over: the communicator that each message's `over` names.

        Raises:
            ValueError: the communicators have been freed.
        """
        if not messages:
            return
        self.check_open()
        if flat.dtype == torch.bfloat16 and all(m.primitive in COPIES for m in messages):
            self._exchange(messages, flat.view(torch.int16))  # a type that MPI supports
            return
        check_summable(flat)
        # The order matters: with two levels, values are reduced within the nodes before they are
        # encoded.
        for exchange, neighbours in groupby(messages, self._way):
            exchange(list(neighbours), flat)

    def check_open(self) -> None:
        """Check that `free` has not been called.

        Raises:
            ValueError: the communicators have been freed.
        """
        if not self._teams:
            raise ValueError("the communicators have been freed; do not call step() after close()")

    def _way(self, message: Message) -> Callable[[Sequence[Message], Tensor], None]:
        if message.rule:
            return self._exchange_combined
        if not message.codec:
            return self._exchange
        return self._exchange_rounded if message.primitive in SUMS else self._exchange_encoded

    def _exchange_encoded(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Exchange encoded values, which MPI copies as bytes."""
        for message in messages:
            comm = self._teams[message.over]
            with self.trace.stage(message.stage, comm.name, message.bytes):
                self.encoded.exchange(comm, message, flat)

    def _exchange_combined(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Aggregate the vectors of all ranks with a robust rule."""
        self.combiner.exchange(self._teams[messages[0].over], messages, flat)

    def _exchange_rounded(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Reduce a copy of the spans, rounded to bfloat16, and store the sums in `flat`."""
        spans = [slice(*span) for message in messages for span in message.spans]
        with self.trace.stage(messages[0].stage):
            rounded = torch.empty_like(flat, dtype=torch.bfloat16)
            for span in spans:
                rounded[span] = flat[span]
        self._exchange(messages, rounded.view(torch.int16))
        with self.trace.stage(messages[0].stage):
            for span in spans:
                flat[span] = rounded[span]

    def _exchange(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Exchange uncompressed values of a type that MPI supports."""
        summed = any(message.primitive not in COPIES for message in messages)
        # NCCL would require messages between pairs to be started as a batch.
        pairs = any(message.primitive == PASSED for message in messages)
        by_host = pairs and isinstance(self.world, ProcessGroupComm)
        of = self._buffers.on_host if by_host else partial(self._buffers.of, summed=summed)
        with of(flat, messages[0].stage) as buffer:
            for message in messages:
                comm = self._teams[message.over]
                sent = sent_elements(message, comm.rank) * flat.element_size()
                with self.trace.stage(message.stage, comm.name, sent):
                    PRIMITIVES[message.primitive](comm, buffer, message, self._buffers)

    def pass_rows(self, message: Message, sent: Tensor, received: Tensor) -> None:
        """Send each member a part of `sent`; fill `received` with a part from each, in rank order.

        Collective over: the communicator that the message's `over` names.

        Raises:
            ValueError: the communicators have been freed, or there are too many elements for one
                message.
        """
        self.check_open()
        comm, size, sizes = self._teams[message.over], sent.element_size(), message.sizes
        outgoing = [count // size for count in sizes[comm.rank]]
        incoming = [row[comm.rank] // size for row in sizes]
        most = max(map(sum, [*sizes, *zip(*sizes)]))  # over all members, so that all or none raise
        check_sendable(message.stage, most // size)
        with (
            self._buffers.both(sent, received, message.stage) as buffers,
            self.trace.stage(message.stage, comm.name, message.bytes),
        ):
            comm.Alltoallv([buffers[0], outgoing], [buffers[1], incoming])

    def sum_in_order(self, parts: Tensor, flat: Tensor, stage: str) -> None:
        """Set `flat` to the sum of all ranks' `parts` `[n, len(flat)]`, added in rank order.

        The sum starts with rank 0's first part and is passed from rank to rank; the last rank
        broadcasts the result. The order of the additions therefore does not depend on how the
        parts are distributed over ranks.

        Collective over: world.
        """
        check_summable(flat)
        several = self.world.size > 1
        with self.trace.stage(stage, "world" if several else "", flat.nbytes if several else 0):
            parts, total = parts.cpu(), flat.cpu()  # not copied if they are in host memory
            sum_in_order(self.world, parts, total)
            flat.copy_(total)

    def overlapped(
        self,
        messages: Sequence[Message],
        layout: Layout,
        flat: Tensor,
        urgency: int,
        over: str = "world",
    ) -> OverlappedSums:
        """Return a sender that reduces `flat`, message by message, during computation.

        Collective over: the communicator that `over` names; all its ranks must call this in the
        same order, before any message is sent.

        Raises:
            ValueError: MPI does not support calls from several threads.
        """
        check_summable(flat)
        if over not in self._progress:
            team, memory = self._teams[over], self.encoded.memory
            self._progress[over] = ProgressThread(team, self.trace, flat.device, memory)
        return self._progress[over].overlapped(messages, layout, flat, urgency)

    def reset(self) -> None:
        """Discard the compression errors, as a restart does."""
        self.encoded.reset()

    def free(self) -> None:
        """Free all communicators once the threads of overlapped reductions have ended.

        No messages can be sent afterwards.

        Collective over: world.

        Raises:
            UserError: other ranks do not take part in one of this rank's overlapped messages.
        """
        for thread in self._progress.values():
            thread.close()
        for comm in self.communicators:
            comm.Free()
        self._teams, self._progress = {}, {}


def _communicators(
    comm: MPI.Intracomm,
    rows: int,
    ranks_per_node: int | None,
    tp_plan: TensorParallelPlan | None,
) -> dict[str, MPI.Intracomm]:
    """Return the communicators of a grid, by name."""
    world = comm.Create_cart([rows, comm.size // rows])
    teams = {"world": world, "column": world.Sub([True, False]), "row": world.Sub([False, True])}
    for name, team in teams.items():
        team.name = name
    levels, groups = {}, {}
    if ranks_per_node is not None:
        check_nodes(world, ranks_per_node)
        levels = _two_levels(teams, world.rank // ranks_per_node)
    if tp_plan is not None and tp_plan.tp_size > 1:
        groups = _groups(world, tp_plan)
    return {**teams, **levels, **groups}


def _two_levels(teams: Mapping[str, MPI.Intracomm], node: int) -> dict[str, MPI.Intracomm]:
    """Split each communicator into one within the node and one between nodes."""
    parts: dict[str, MPI.Intracomm] = {}
    for name, team in teams.items():
        inside = cast(MPI.Intracomm, team.Split(node))
        across = cast(MPI.Intracomm, team.Split(inside.rank))
        parts |= {IN_NODE.format(name): inside, BETWEEN_NODES.format(name): across}
        inside.name = f"{IN_NODE.format(name)} {node}"
        across.name = f"{BETWEEN_NODES.format(name)} {inside.rank}"
    return parts


def _groups(world: MPI.Intracomm, tp_plan: TensorParallelPlan) -> dict[str, MPI.Intracomm]:
    """Return the communicators of this rank's tensor-parallel group and of its peers, by name."""
    parts: dict[str, MPI.Intracomm] = {}
    for name, team in (("group", tp_plan.group), ("peers", tp_plan.peers)):
        parts[name] = cast(MPI.Intracomm, world.Split(team(world.rank, world.size)[0]))
        parts[name].name = name
    return parts


def _senders(trace: Trace, comm: MPI.Intracomm) -> tuple[Combiner, Encoded, Buffers]:
    """Return the objects that send messages, in their initial states."""
    direct = cuda_aware(comm)
    return Combiner(trace), Encoded(direct), Buffers(trace, direct)
