"""Wrap a process group of torch.distributed as a communicator, with the methods that mpikfac uses.

Buffers in host memory need gloo. Device buffers are sent by the group's backend for the device,
unless that is gloo, which needs copies in host memory; this has not been tested with NCCL.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, distributed_c10d

from mpikfac import files
from mpikfac.comm.messages.collectives import bfloat16_sum
from mpikfac.comm.mpi import MPI, connected
from mpikfac.errors import RankLostError

SOURCE = re.compile(r"^\[\S*\] ")
"""A pattern for the source file at the beginning of gloo's error messages."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


def over(group: ProcessGroup | None = None) -> MPI.Intracomm:
    """Return a communicator over a process group of torch.distributed; None means all processes.

        torch.distributed.init_process_group("gloo")
        optimizer = mpikfac.KFACOptimizer(model, comm=mpikfac.over())

    The group needs a backend for host memory: "gloo", or "cpu:gloo,cuda:nccl" to send device
    memory with NCCL. The order in which the backend adds values can differ from MPI's.
    Strategies with servers need MPI. Processes outside a group must not call this function: torch's
    `new_group` returns None to some of them, and None stands for the group of all processes.

    Collective over: none.

    Raises:
        ValueError: torch.distributed is not initialised, this process is not in the group, or the
            group cannot send host memory.
    """
    if not connected():
        raise ValueError(
            "torch.distributed connects no processes; call init_process_group before mpikfac.over"
        )
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"group={group!r} must be a process group that contains this process")
    if "cpu:" not in (backends := distributed.get_backend_config(group)):
        raise ValueError(
            f"the process group's backends are {backends!r}, and K-FAC also sends host memory: use "
            f"init_process_group('cpu:gloo,cuda:nccl')"
        )
    return cast("MPI.Intracomm", ProcessGroupComm(group))


class Request:
    """An operation that has been started; it keeps its buffers alive."""

    def __init__(self, comm: ProcessGroupComm, name: str, work: Any, *buffers: Any) -> None:
        self._comm, self._name, self._work, self._buffers = comm, name, work, buffers

    def Test(self) -> bool:
        """Return whether the operation is complete."""
        if not self._work.is_completed():
            return False
        self.Wait()  # raises the operation's error
        return True

    def Wait(self) -> None:
        """Wait until the operation is complete."""
        self._comm.call(self._name, self._work.wait)


class Meeting(NamedTuple):
    """The request of a barrier in torch's store; ranks can be in collectives meanwhile."""

    store: Any
    key: str
    size: int

    def Test(self) -> bool:
        """Return whether all ranks have arrived."""
        return self.add(0)

    def add(self, arrived: int) -> bool:
        """Add `arrived` to the number of ranks that have arrived; return whether all have."""
        try:
            return bool(self.store.add(self.key, arrived) >= self.size)
        except RuntimeError:  # the process that hosts the store has left the meeting
            return True


class GroupKind(NamedTuple):
    """The properties that process groups must share to be interchangeable."""

    ranks: tuple[int, ...]
    backends: str
    timeout: timedelta


class ProcessGroupComm:
    """A process group with the methods of mpi4py's communicators.

    Buffers are NumPy arrays, tensors, or `[buffer, counts]` or `[buffer, counts, starts, None]`
    with a part per rank.

    Args:
        sides: the numbers of rows and columns of the grid, for `Sub`; empty without a grid.
        pool: the list to which `Free` returns the group; None if `Free` does nothing.

    Attributes:
        direct: whether device buffers can be passed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str = "world",
        sides: Sequence[int] = (),
        pool: list[ProcessGroup] | None = None,
    ) -> None:
        self._group, self._sides, self._pool = group, tuple(sides), pool
        self._ranks = distributed.get_process_group_ranks(group)
        self.rank, self.size = distributed.get_rank(group), len(self._ranks)
        self.name = name
        others = (pair.partition(":") for pair in distributed.get_backend_config(group).split(","))
        self.direct = any(kind != "cpu" and backend != "gloo" for kind, _, backend in others)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Call a function that communicates.

        Raises:
            RankLostError: the call failed because another rank has ended, or does not take part.
            RuntimeError: the call failed for another reason, such as too little memory.
        """
        try:
            return function(*args, **settings)
        except RuntimeError as error:
            if not _tells_of_loss(error):
                raise
            text = SOURCE.sub("", str(error)).partition(". ")[0]
            raise RankLostError(
                f"{name} over {self.name!r} failed, because another rank has ended or does not "
                f"take part; see what that rank or the launcher reports for the cause ({text})"
            ) from error

    def _start(
        self, name: str, collective: Callable[..., Any], *buffers: Any, **settings: Any
    ) -> Request:
        settings |= {"group": self._group}
        if collective not in (distributed.isend, distributed.irecv):
            settings["async_op"] = True
        return Request(self, name, self.call(name, collective, *buffers, **settings), *buffers)

    # -- objects ---------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.size
        self.call("allgather", distributed.all_gather_object, values, value, group=self._group)
        return values

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on the root, and None elsewhere."""
        values = [None] * self.size if self.rank == root else None
        settings = {"group": self._group, "group_dst": root}
        self.call("gather", distributed.gather_object, value, values, **settings)
        return values

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's value from the root's list."""
        own: list[Any] = [None]
        of_all = list(values) if self.rank == root and values is not None else None
        settings = {"group": self._group, "group_src": root}
        self.call("scatter", distributed.scatter_object_list, own, of_all, **settings)
        return own[0]

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the root's value."""
        values = [value]
        settings = {"group": self._group, "group_src": root}
        self.call("bcast", distributed.broadcast_object_list, values, **settings)
        return values[0]

    # -- communicators ---------------------------------------------------------------------------

    def _of(self, members: Sequence[int], name: str, sides: Sequence[int] = ()) -> ProcessGroupComm:
        """Return a communicator of `members`; communicators of the same `GroupKind` share a group.

        Collective over: members.
        """
        kind, groups = self._kind(members), _groups(distributed.group.WORLD)
        if kind not in groups.shared:
            groups.shared[kind] = groups.create(kind)
        return ProcessGroupComm(groups.shared[kind], name, sides)

    def _kind(self, members: Sequence[int]) -> GroupKind:
        ranks = tuple(self._ranks[member] for member in members)
        if list(ranks) != sorted(ranks):
            raise ValueError(f"ranks {list(ranks)} of a process group must be in ascending order")
        options = self._group._get_backend(torch.device("cpu")).options
        return GroupKind(ranks, distributed.get_backend_config(self._group), options._timeout)

    def Split(self, color: int = 0, key: int = 0) -> ProcessGroupComm:
        """Return the communicator of the ranks with the same color; keys must ascend with rank."""
        chosen = self.allgather((color, key))
        members = [member for member, (other, _) in enumerate(chosen) if other == color]
        return self._of(sorted(members, key=lambda member: chosen[member][1]), "split")

    def Split_type(self, kind: int) -> ProcessGroupComm:
        """Return the communicator of the ranks on this node."""
        nodes = self.allgather((platform.node(), files.read_text(BOOT) if BOOT.exists() else ""))
        return self._of([m for m, node in enumerate(nodes) if node == nodes[self.rank]], "node")

    def Create_cart(self, sides: Sequence[int]) -> ProcessGroupComm:
        """Return a communicator of the same ranks, in a grid with `sides` rows and columns."""
        return self._of(range(self.size), self.name, sides)

    def Sub(self, remain_dims: Sequence[bool]) -> ProcessGroupComm:
        """Return the communicator of this rank's column or row in the grid."""
        grid = np.arange(self.size).reshape(self._sides)
        row, column = divmod(self.rank, self._sides[1])
        members = grid[:, column] if remain_dims[0] else grid[row]
        return self._of(members.tolist(), "split")

    def Dup(self) -> ProcessGroupComm:
        """Return a communicator of the same ranks with its own process group."""
        kind, groups = self._kind(range(self.size)), _groups(distributed.group.WORLD)
        free = groups.free.setdefault(kind, [])
        group = free.pop(0) if free else groups.create(kind)
        return ProcessGroupComm(group, self.name, pool=free)

    def Free(self) -> None:
        """Return the process group of a communicator from `Dup` to the pool, for the next `Dup`."""
        if self._pool is not None:
            self._pool.append(self._group)
            self._pool = None

    # -- reductions ------------------------------------------------------------------------------

    def Iallreduce(self, sent: Any, received: Any, op: Any = None) -> Request:
        """Start an all-reduce."""
        total, reduction = _summed(_flat(received), op)
        if sent is not MPI.IN_PLACE:
            total.copy_(_summed(_flat(sent), op)[0])
        return self._start("Allreduce", distributed.all_reduce, total, op=reduction)

    def Allreduce(self, sent: Any, received: Any, op: Any = None) -> None:
        """All-reduce."""
        self.Iallreduce(sent, received, op).Wait()

    def Ireduce(self, sent: Any, received: Any, op: Any = None, root: int = 0) -> Request:
        """Start a reduction to the root; buffers of other ranks keep their values."""
        if self.rank == root:
            total, reduction = _summed(_flat(received), op)
            if sent is not MPI.IN_PLACE:
                total.copy_(_summed(_flat(sent), op)[0])
        else:
            total, reduction = _summed(_flat(sent).clone(), op)  # gloo writes to all buffers
        return self._start("Reduce", distributed.reduce, total, group_dst=root, op=reduction)

    def Reduce(self, sent: Any, received: Any, op: Any = None, root: int = 0) -> None:
        """Reduce to the root."""
        self.Ireduce(sent, received, op, root).Wait()

    def Reduce_scatter(
        self, sent: Any, received: Any, counts: Sequence[int], op: Any = None
    ) -> None:
        """Reduce-scatter parts of any size."""
        total, reduction = _summed(_flat(received), op)
        parts = list(_summed(_flat(sent), op)[0].split(list(counts)))
        self._start("Reduce_scatter", distributed.reduce_scatter, total, parts, op=reduction).Wait()

    def Reduce_scatter_block(self, sent: Any, received: Any, op: Any = None) -> None:
        """Reduce-scatter parts of equal size."""
        self.Reduce_scatter(sent, received, [len(_flat(received))] * self.size, op)

    # -- copies ----------------------------------------------------------------------------------

    def Bcast(self, buffer: Any, root: int = 0) -> None:
        """Copy the root's buffer to all ranks."""
        self._start("Bcast", distributed.broadcast, _bytes(buffer), group_src=root).Wait()

    def Iallgather(self, sent: Any, received: Any) -> Request:
        """Start an all-gather of parts of equal size."""
        parts = _parts(received, self.size)
        return self._start("Allgather", distributed.all_gather, parts, _bytes(sent))

    def Allgather(self, sent: Any, received: Any) -> None:
        """Gather parts of equal size on all ranks."""
        self.Iallgather(sent, received).Wait()

    def Allgatherv(self, sent: Any, received: Any) -> None:
        """Gather parts of any size on all ranks."""
        parts = _parts(received, self.size)  # gloo does not gather unequal parts
        if sent is not MPI.IN_PLACE:
            parts[self.rank].copy_(_bytes(sent))
        requests = [
            self._start("Allgatherv", distributed.broadcast, part, group_src=root)
            for root, part in enumerate(parts)
            if len(part)
        ]
        for request in requests:
            request.Wait()

    def Ialltoallv(self, sent: Any, received: Any) -> Request:
        """Start an all-to-all of parts of any size; the received parts must be adjacent."""
        parts, places = _parts(sent, self.size), _parts(received, self.size)
        counts = [len(part) for part in places], [len(part) for part in parts]
        start, stop = places[0].storage_offset(), sum(counts[0])
        into = places[0].as_strided((stop,), (1,), start)  # places are adjacent
        send = distributed.all_to_all_single
        return self._start("Alltoallv", send, into, _joined(parts), *counts)

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """Send every rank a part of any size."""
        self.Ialltoallv(sent, received).Wait()

    def Ialltoall(self, sent: Any, received: Any) -> Request:
        """Start an all-to-all of parts of equal size."""
        return self.Ialltoallv(sent, received)

    def Alltoall(self, sent: Any, received: Any) -> None:
        """Send every rank a part of equal size."""
        self.Ialltoallv(sent, received).Wait()

    # -- pairs -----------------------------------------------------------------------------------

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Request:
        """Start sending a buffer."""
        return self._start("Send", distributed.isend, _bytes(buffer), group_dst=dest, tag=tag)

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> Request:
        """Start receiving a buffer."""
        return self._start("Recv", distributed.irecv, _bytes(buffer), group_src=source, tag=tag)

    def Send(self, buffer: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer."""
        self.Isend(buffer, dest, tag).Wait()

    def Recv(self, buffer: Any, source: int, tag: int = 0) -> None:
        """Receive a buffer."""
        self.Irecv(buffer, source, tag).Wait()

    def Sendrecv_replace(self, buffer: Any, dest: int, source: int) -> None:
        """Send a buffer, and receive another one in its place."""
        sent = self.Isend(_bytes(buffer).clone(), dest)
        self.Recv(buffer, source)
        sent.Wait()

    # -- ends ------------------------------------------------------------------------------------

    def Barrier(self) -> None:
        """Wait for all ranks."""
        self._start("Barrier", distributed.barrier).Wait()

    def Ibarrier(self) -> Meeting:
        """Announce that this rank has arrived; return a request that tests whether all have."""
        meetings = _groups(distributed.group.WORLD).meetings
        meetings[self._group] += 1
        key = f"mpikfac/end {meetings[self._group]}"
        meeting = Meeting(self._group.get_group_store(), key, self.size)
        meeting.add(1)
        return meeting

    def Abort(self, errorcode: int = 1) -> None:
        """End this process; the launcher, or the lost connection, ends the other processes."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode)


# -- process groups --------------------------------------------------------------------------------


class Groups:
    """Hold the process groups that communicators use.

    torch would name a group by its ranks and by the number of groups in the process, which can
    differ between ranks, and decreases when the program destroys a group. Names are therefore
    chosen here, from counts that are equal on all ranks of a group.

    Args:
        world: the group of all processes; each `init_process_group` creates a new one.

    Attributes:
        shared: for each kind, the group that all its communicators share, except for those that
            `Dup` returned; the ranks of a group call its collectives in the same order.
        free: for each kind, the groups that `Free` has returned, to be used by the next `Dup`.
        created: for each tuple of ranks, the number of groups created so far.
        meetings: for each group, the number of `Ibarrier`s so far.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self.shared: dict[GroupKind, ProcessGroup] = {}
        self.free: dict[GroupKind, list[ProcessGroup]] = {}
        self.created: Counter[tuple[int, ...]] = Counter()
        self.meetings: Counter[ProcessGroup] = Counter()

    def create(self, kind: GroupKind) -> ProcessGroup:
        """Return a new process group of the given kind.

        Collective over: the group's ranks.
        """
        ranks, rank = list(kind.ranks), self.world.rank()
        self.created[kind.ranks] += 1
        name: Any = f"mpikfac {self.created[kind.ranks]} {ranks}"
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            ranks,
            distributed.Backend(kind.backends),
            distributed_c10d._get_default_store(),
            name,
            timeout=kind.timeout,
            device_id=self.world.bound_device_id,
        )
        assert isinstance(group, ProcessGroup)
        places = {member: place for place, member in enumerate(ranks)}
        distributed_c10d._world.pg_group_ranks[group] = places
        return group


_groups = lru_cache(maxsize=1)(Groups)


def _tells_of_loss(error: RuntimeError) -> bool:
    """Return whether an error from torch.distributed concerns another rank or the connection."""
    text = str(error)
    gloo = SOURCE.match(text) is not None or "Timed out" in text
    return gloo or isinstance(error, distributed.DistError)


# -- buffers ---------------------------------------------------------------------------------------


def _flat(buffer: Any) -> Tensor:
    """Return a flat tensor over the memory of a buffer, or over a copy if it is read-only."""
    if isinstance(buffer, np.ndarray):
        buffer = torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy())
    elif not isinstance(buffer, Tensor):
        buffer = torch.frombuffer(buffer, dtype=torch.uint8)
    flat = buffer.detach().view(-1)
    # A tensor with fewer than two elements can have any stride; give it stride 1.
    return flat if len(flat) > 1 else flat.as_strided((len(flat),), (1,))


def _bytes(buffer: Any) -> Tensor:
    return _flat(buffer).view(torch.uint8)


def _summed(numbers: Tensor, op: Any = None) -> tuple[Tensor, Any]:
    """Return `numbers` in a dtype that torch.distributed can reduce, and its operation for `op`.

    Raises:
        ValueError: torch.distributed has no operation for `op`.
    """
    if op is None or op == MPI.SUM:
        return numbers, distributed.ReduceOp.SUM
    if op == MPI.BAND:
        return numbers, distributed.ReduceOp.MIN  # like BAND, because all values are 0 or 1
    if op == bfloat16_sum():
        return numbers.view(torch.bfloat16), distributed.ReduceOp.SUM
    raise ValueError(f"op={op!r} cannot be reduced over a process group: use MPI.SUM")


def _parts(buffer: Any, size: int) -> list[Tensor]:
    """Return the parts of a buffer, one per rank, as bytes."""
    if not isinstance(buffer, list):
        return list(_bytes(buffer).tensor_split(size))
    whole, counts, *others = buffer
    starts = others[0] if others else [0, *accumulate(counts[:-1])]
    flat = _flat(whole)
    return [flat[at : at + count].view(torch.uint8) for at, count in zip(starts, counts)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one tensor, without a copy if they are adjacent."""
    if all(a.storage_offset() + len(a) == b.storage_offset() for a, b in pairwise(parts)):
        return parts[0].as_strided((sum(map(len, parts)),), (1,))
    return torch.cat(list(parts))
