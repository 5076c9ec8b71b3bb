"""Everything that communicates: start-up checks, the grid of ranks, collectives on arenas.

The only importer of mpi4py. Device buffers go to MPI directly when it is CUDA-aware, otherwise
through pinned host memory. The training calls blocking collectives only: Open MPI makes no progress
on others unless it is called. The thread that sends beside it does that, sleeping in between: it
would poll a core that belongs to the computation. Its buffers are the host's, as Open MPI crashes
in non-blocking reductions of device buffers. What goes to curvature ranks and back does not block
either; it moves on while both sides are in some call of MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from mpi4py import MPI
from torch import Tensor

from mpikfac.encoded import Encoded
from mpikfac.errors import PATIENCE, USAGE_ERROR, UserError
from mpikfac.layout import Layout
from mpikfac.levels import BETWEEN_NODES, IN_NODE
from mpikfac.messages import PIECE, Message
from mpikfac.outbox import PAUSE, Outbox
from mpikfac.trace import Trace

# mpi4py sends a dtype unknown to MPI as bytes, and sums of those are garbage without an error.
SUMMABLE = (torch.float32, torch.float64)
MAX_COUNT = 2**31 - 1  # elements in one message; Open MPI before 6 refuses more
# Like `PIECE`, for messages beside the computation: how soon an urgent one can overtake.
SMALL_PIECE = 2**18
CLOCK_READINGS = 50  # of which the quickest counts: on a busy machine most are slow
LEAVING = 2**15 - 1  # the highest tag that every MPI has
LOOK_EVERY = 1e-3  # seconds between two looks for a message, of a rank that has nothing else to do
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)


def world() -> MPI.Intracomm:
    """The communicator of all ranks, after checking that the launcher made one job of them.

    Collective over: none.

    Raises:
        SystemExit: code 2 where a launcher started N jobs of size 1; the first of them says why.
    """
    comm = MPI.COMM_WORLD
    for size_name, rank_name in LAUNCHERS:
        claimed = int(os.environ.get(size_name, 0))
        if claimed and comm.size == 1:
            if claimed > 1:
                _refuse_singletons(size_name, claimed, int(os.environ.get(rank_name, 0)))
            break
    return comm


def _refuse_singletons(name: str, claimed: int, rank: int) -> None:
    if rank == 0:
        print(
            f"mpikfac: {name}={claimed} but MPI sees 1 rank: the launcher started {claimed} "
            f"separate jobs. Use the mpirun of the MPI that mpi4py loads "
            f"({MPI.Get_library_version().split(',')[0].strip()}), or srun with its plug-in "
            f"(--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH); for one process, unset {name}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(USAGE_ERROR)


@contextmanager
def together(comm: MPI.Intracomm, doing: str) -> Iterator[None]:
    """A failure of the body on any rank becomes the same `UserError` on every rank.

    Catches what files and data raise (`OSError`, `ValueError`, `UserError`); the lowest failing
    rank's text, after `doing`, is raised everywhere.

    Collective over: comm.
    """
    text, cause = None, None
    try:
        yield
    except (OSError, ValueError, UserError) as error:
        text, cause = str(error), error
    texts = [found for found in comm.allgather(text) if found is not None]
    if texts:
        raise UserError(f"{doing}: {texts[0]}") from cause


def agree(comm: MPI.Intracomm, values: Mapping[str, object]) -> None:
    """Returns if every rank holds the same `values`.

    Collective over: comm.

    Raises:
        UserError: the first key whose value differs, both values, and the ranks that hold them.
    """
    mine = {key: repr(value) for key, value in values.items()}
    first, *rest = comm.allgather(mine)
    for rank, theirs in enumerate(rest, start=1):
        for key in [*first, *theirs]:
            if first.get(key) != theirs.get(key):
                raise UserError(
                    f"ranks disagree on {key}: {first.get(key)} on rank 0, {theirs.get(key)} on "
                    f"rank {rank}; start all ranks with the same code, configuration and versions"
                )


def broadcast(comm: MPI.Intracomm, tensors: Sequence[Tensor]) -> None:
    """Every rank's tensors become rank 0's.

    Collective over: comm.
    """
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        content = host.view(-1).view(torch.uint8).numpy()
        for piece in _pieces(content, 0, len(content), MAX_COUNT):
            comm.Bcast(piece, root=0)
        if comm.rank:
            with torch.no_grad():
                tensor.copy_(host)


def clock_offset(comm: MPI.Intracomm) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's, at this moment.

    Wrong by half the time of a message there and back at most, the quickest of several.

    Collective over: comm.
    """
    clock = array("d", [0.0])
    if comm.rank == 0:
        for rank in range(1, comm.size):  # one after the other: nobody's message has to wait
            for _ in range(CLOCK_READINGS):
                comm.Recv(clock, source=rank)
                clock[0] = time.perf_counter()
                comm.Send(clock, dest=rank)
        return 0.0
    readings = []
    for _ in range(CLOCK_READINGS):
        began = time.perf_counter()
        comm.Sendrecv_replace(clock, dest=0, source=0)
        ended = time.perf_counter()
        readings.append((ended - began, clock[0] - (began + ended) / 2))
    return min(readings)[1]


def device(comm: MPI.Intracomm, kind: str = "auto") -> torch.device:
    """This rank's device: one GPU for each rank of a node, shared in turn if there are fewer.

    Args:
        kind: "cpu", "cuda", or "auto" for CUDA where there is some.

    Collective over: comm.
    """
    local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={kind!r} but torch finds no GPU; use device='cpu'")
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def cuda_aware() -> bool:
    """Whether MPI takes device buffers; MPIKFAC_CUDA_AWARE=0 or 1 overrides its answer."""
    override = os.environ.get("MPIKFAC_CUDA_AWARE")
    if override is not None:
        return override == "1"
    if not torch.cuda.is_available():  # the library's answer is true wherever a driver loads
        return False
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libmpi.so" in line}
    queries = [getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) for path in libraries]
    return any(query is not None and query() for query in queries)


def check_survivable() -> None:
    """Returns if the job outlives a rank, so that the others can go on.

    Collective over: none.

    Raises:
        ValueError: MPI or the way it was started does not allow it; what to do.
    """
    if _survives():
        return
    library = MPI.Get_library_version().split(",")[0].strip()
    raise ValueError(
        f"a job of {library}, started like this, ends when a rank dies; "
        f"use Open MPI 5 and start it by mpirun --with-ft ulfm"
    )


def lost_a_rank(comm: MPI.Intracomm, error: BaseException) -> bool:
    """Whether the error says or stems from that a rank has died, or that others have found so.

    Collective over: none.
    """
    if isinstance(error, MPI.Exception):
        signs = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
        return error.Get_error_class() in signs
    # Open MPI may return from a collective in which a rank died as if all were well; what it
    # received then is anything, and the word of the death comes later.
    deadline = time.monotonic() + PATIENCE
    while not (lost := comm.Is_revoked() or comm.Get_failed().size > 0):
        if isinstance(error, UserError) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return lost


def survivors(comm: MPI.Intracomm, *grids: Grid) -> MPI.Intracomm:
    """A communicator of the ranks that are left, in their order; to be called by all of them.

    Ranks that still wait in `comm` or in one of `grids` are woken with an error.

    Collective over: the ranks of comm that are left.
    """
    for grid in grids:
        for part in grid.communicators:
            part.Revoke()
    comm.Revoke()
    return cast(MPI.Intracomm, comm.Shrink())


def leaving(code: int) -> int:
    """The exit code `code`, with MPI ended: a rank that then leaves with it ends no other one.

    Where ranks were lost the process ends without MPI, which may wait for them for ever.

    Collective over: the ranks that are left.
    """
    if _survives() and MPI.COMM_WORLD.Get_failed().size:
        atexit.register(_leave_without_mpi, code)
    elif code:
        MPI.Finalize()
    return code


def _leave_without_mpi(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _survives() -> bool:
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 (its name is like this)


def lowest_in_node(comm: MPI.Intracomm) -> int:
    """The lowest of the ranks that share memory with this one.

    Collective over: comm.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.rank)
    node.Free()
    return int(lowest)


def _check_nodes(comm: MPI.Intracomm, ranks_per_node: int) -> None:
    """Returns if ranks of one `r // ranks_per_node` share memory; a node may hold several such."""
    nodes = comm.allgather(lowest_in_node(comm))
    for rank, node in enumerate(nodes):
        first = rank - rank % ranks_per_node
        if nodes[first] != node:
            raise UserError(
                f"ranks_per_node={ranks_per_node}: ranks {first} and {rank} are on different "
                f"nodes; start ranks node by node, equally many on each, or leave it out"
            )


# -- curvature ranks -----------------------------------------------------------------------------


def split(
    comm: MPI.Intracomm, curvature_ranks: int
) -> tuple[MPI.Intracomm | None, MPI.Intercomm | None]:
    """The communicator of the ranks that train, and what joins them to the others, the last ones.

    The first is None on those others, the second everywhere if there are none of them:

        training, curvature = mpikfac.split(comm, curvature_ranks=1)
        if training is None:
            mpikfac.serve(curvature)
        else:
            strategy = Strategy.comm_opt(training.size, delay=1, curvature_ranks=1)
            kfac = KFAC(model, optimizer, training, strategy, curvature=curvature)
            ...
            kfac.close()

    Collective over: comm.

    Raises:
        ValueError: no rank would train.
    """
    if not 0 <= curvature_ranks < comm.size:
        raise ValueError(
            f"curvature_ranks={curvature_ranks} must be less than the number of ranks ({comm.size})"
        )
    if curvature_ranks == 0:
        return comm, None
    first = comm.size - curvature_ranks
    trains = comm.rank < first
    team = cast(MPI.Intracomm, comm.Split(color=int(trains), key=comm.rank))
    curvature = team.Create_intercomm(0, comm, first if trains else 0)
    return team if trains else None, curvature


def tell(curvature: MPI.Intercomm, value: object) -> None:
    """Gives all curvature ranks training rank 0's `value`, for which they call `told`.

    Collective over: curvature.
    """
    curvature.bcast(value, root=MPI.PROC_NULL if curvature.rank else MPI.ROOT)


def told(curvature: MPI.Intercomm) -> Any:
    """What training rank 0 tells this curvature rank.

    Collective over: curvature.
    """
    return curvature.bcast(None, root=0)


def begin_send(comm: MPI.Comm, flat: Tensor, to: int, tag: int) -> Callable[[], object]:
    """Starts to send `flat`, on the host; returns what waits until it is sent.

    It must not change until then. Collective over: none.
    """
    pieces = _pieces(flat.numpy(), 0, len(flat), MAX_COUNT)
    requests = [comm.Isend(piece, dest=to, tag=tag) for piece in pieces]
    return lambda: MPI.Request.Waitall(requests)


def begin_receive(comm: MPI.Comm, flat: Tensor, source: int, tag: int) -> Callable[[], object]:
    """Starts to receive `flat`, on the host; returns what waits until it is there.

    Collective over: none.
    """
    pieces = _pieces(flat.numpy(), 0, len(flat), MAX_COUNT)
    requests = [comm.Irecv(piece, source=source, tag=tag) for piece in pieces]
    return lambda: MPI.Request.Waitall(requests)


def arrivals(curvature: MPI.Intercomm) -> Iterator[tuple[int, int]]:
    """Source and tag of each message that comes, in turn, until all training ranks `leave`.

    It has to be received before the next one is asked for. Between two looks the rank sleeps: in a
    call of MPI it would keep a core busy, perhaps one of a rank that trains.

    Collective over: none.
    """
    left, status = 0, MPI.Status()
    while left < curvature.remote_size:
        if not curvature.Iprobe(status=status):
            time.sleep(LOOK_EVERY)
        elif status.tag == LEAVING:
            curvature.Recv(bytearray(), source=status.source, tag=LEAVING)
            left += 1
        else:
            yield status.source, status.tag


def leave(curvature: MPI.Intercomm) -> None:
    """Ends the curvature ranks' `arrivals`, once all training ranks have called this.

    Message by message: Open MPI's Ibarrier between two groups lets some go before all have come.

    Collective over: none.
    """
    for rank in range(curvature.remote_size):
        curvature.Send(b"", dest=rank, tag=LEAVING)


# -- collectives on arenas -----------------------------------------------------------------------


class Grid:
    """The ranks as `rows` x `columns`, with a communicator for each direction.

    Rank r sits at row `r // columns`, column `r % columns`. Collective over: world.

    Attributes:
        world: all ranks; statistics and gradients are reduced over it.
        column: the gradient workers of one layer group; bases are published in it.
        row: one rank of every column; preconditioned gradients are published in it.
        encoded: what sends numbers that travel encoded, and keeps what that loses.

    Raises:
        UserError: ranks that should share a node do not.
    """

    def __init__(
        self, comm: MPI.Intracomm, rows: int, trace: Trace, ranks_per_node: int | None = None
    ) -> None:
        self.world = comm.Create_cart([rows, comm.size // rows])
        self.column = self.world.Sub([True, False])
        self.row = self.world.Sub([False, True])
        self._teams: dict[str, MPI.Intracomm] = {}
        for name, team in (("world", self.world), ("column", self.column), ("row", self.row)):
            self._teams[name], team.name = team, name
        if ranks_per_node is not None:
            _check_nodes(self.world, ranks_per_node)
            self._teams |= self._levels(self.world.rank // ranks_per_node)
        self.trace = trace
        self._direct = cuda_aware()
        self.encoded = Encoded(self._direct)
        self._outbox: Outbox | None = None
        self._numbered = 0
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def communicators(self) -> list[MPI.Intracomm]:
        """All its communicators."""
        quiet = [self._quiet] if self._outbox is not None else []
        return [*self._teams.values(), *quiet]

    def _levels(self, node: int) -> dict[str, MPI.Intracomm]:
        """The parts of each communicator that `levels` speaks of."""
        parts: dict[str, MPI.Intracomm] = {}
        for name, team in self._teams.items():
            inside = cast(MPI.Intracomm, team.Split(node))
            across = cast(MPI.Intracomm, team.Split(inside.rank))
            parts |= {IN_NODE.format(name): inside, BETWEEN_NODES.format(name): across}
            inside.name = f"{IN_NODE.format(name)} {node}"
            across.name = f"{BETWEEN_NODES.format(name)} {inside.rank}"
        return parts

    def exchange(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Sends what the messages say of `flat`, one after the other.

        Summed elements become sums over all ranks, on every rank or on the message's root;
        gathered ones those of the member that they come from, or where they travel encoded what all
        members decode, that one too. What a rank neither owns nor gets is undefined.

        Collective over: each message's `over`.
        """
        if not messages:
            return
        _check(flat)
        self._exchange_rounded([m for m in messages if m.codec and m.primitive in SUMS], flat)
        for message in messages:
            if message.codec and message.primitive not in SUMS:
                comm = self._teams[message.over]
                with self.trace.stage(message.stage, comm.name, message.bytes):
                    self.encoded.exchange(comm, message, flat)
        self._exchange([message for message in messages if not message.codec], flat)

    def _exchange_rounded(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Sums in bfloat16: MPI adds up a rounded copy."""
        if not messages:
            return
        with self.trace.stage(messages[0].stage):
            rounded = flat.to(torch.bfloat16)
        self._exchange(messages, rounded.view(torch.int16))
        with self.trace.stage(messages[0].stage):
            for message in messages:
                for start, stop in message.spans:
                    flat[start:stop] = rounded[start:stop]

    def _exchange(self, messages: Sequence[Message], flat: Tensor) -> None:
        """Numbers as MPI takes them."""
        if not messages:
            return
        with self._buffer(flat, messages[0].stage) as buffer:
            for message in messages:
                comm = self._teams[message.over]
                sent = _handed(message, comm.rank) * flat.element_size()
                with self.trace.stage(message.stage, comm.name, sent):
                    PRIMITIVES[message.primitive](self, comm, buffer, message)

    def beside(
        self, messages: Sequence[Message], layout: Layout, flat: Tensor, urgency: int
    ) -> Beside:
        """What sends the messages of `flat`, sums over the world, beside the computation.

        Collective over: world; in the same order on all ranks, before any of them is sent.

        Raises:
            ValueError: MPI does not allow it.
        """
        _check(flat)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ValueError("overlap=True needs an MPI that threads may call (THREAD_MULTIPLE)")
        if self._outbox is None:
            self._quiet = self.world.Dup()
            self._side = torch.cuda.Stream() if flat.is_cuda else None
            self._outbox = Outbox(self._in_common)
        outbox, first = self._outbox, self._numbered
        self._numbered += len(messages)

        def send(index: int) -> None:
            outbox.put(first + index, urgency, self._small_pieces(messages[index], flat))

        def wait(index: int) -> None:
            with self.trace.stage(messages[index].stage):
                outbox.wait(first + index)

        return Beside(messages, layout, send, wait)

    def close(self) -> None:
        """Ends the thread that sends beside the computation, if there is one, once all is sent.

        Collective over: world.
        """
        if self._outbox is not None:
            self._outbox.close()

    def _in_common(self, numbers: Sequence[int]) -> list[int]:
        """Those of the outbox's `numbers` that all ranks have."""
        mine = bytearray(self._numbered)
        for number in numbers:
            mine[number] = 1
        _sleep_until(self._quiet.Iallreduce(MPI.IN_PLACE, mine, op=MPI.BAND))
        return [number for number, everywhere in enumerate(mine) if everywhere]

    def _small_pieces(self, message: Message, flat: Tensor) -> list[Callable[[], None]]:
        """What sends a message piece by piece on the outbox's thread."""
        ready = torch.cuda.Event() if flat.is_cuda else None
        if ready is not None:
            ready.record()
        ((start, stop),) = message.spans
        return [
            partial(
                self._send_piece, message, flat[offset : min(offset + SMALL_PIECE, stop)], ready
            )
            for offset in range(start, stop, SMALL_PIECE)
        ]

    def _send_piece(self, message: Message, piece: Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        root, quiet = message.root, self._quiet
        with (
            torch.cuda.stream(self._side),
            self._on_host(piece, message.stage, "beside") as buffer,
            self.trace.stage(message.stage, message.over, piece.nbytes),
        ):
            if message.primitive == "Allreduce":
                _sleep_until(quiet.Iallreduce(MPI.IN_PLACE, buffer))
            elif quiet.rank == root:
                _sleep_until(quiet.Ireduce(MPI.IN_PLACE, buffer, root=root))
            else:
                _sleep_until(quiet.Ireduce(buffer, None, root=root))

    def sum_in_order(self, parts: Tensor, flat: Tensor, stage: str) -> None:
        """`flat` becomes the sum of all ranks' `parts` `[n, len(flat)]`, from rank 0's first on.

        The sum passes from rank to rank, and the last one sends it to all. Each element is added up
        in one order, which does not depend on how the parts are spread over ranks.

        Collective over: world.
        """
        _check(flat)
        world, last = self.world, self.world.size - 1
        with self.trace.stage(stage, "world" if last else "", flat.nbytes if last else 0):
            parts, total = parts.cpu(), flat.cpu()  # themselves where they are on the host
            for start in range(0, len(total), PIECE):
                piece = total[start : start + PIECE]
                if world.rank:
                    world.Recv(piece.numpy(), source=world.rank - 1)
                else:
                    piece.zero_()
                for part in parts:
                    piece += part[start : start + PIECE]
                if world.rank != last:
                    world.Send(piece.numpy(), dest=world.rank + 1)
            for piece in _pieces(total, 0, len(total), PIECE):
                world.Bcast(piece.numpy(), root=last)
            flat.copy_(total)

    def _allreduce(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        ((start, stop),) = message.spans
        for piece in _pieces(buffer, start, stop, PIECE):
            comm.Allreduce(MPI.IN_PLACE, piece, _op(message))

    def _reduce(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        for span in message.spans:
            _reduce_to(message.root, comm, buffer, span, _op(message))

    def _reduce_scatter(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        counts = [stop - start for start, stop in message.spans]
        if sum(counts) <= PIECE:
            start, stop = message.spans[comm.rank]
            own = self._like(buffer, "sum", stop - start)
            comm.Reduce_scatter(self._joined(buffer, message.spans), own, counts, _op(message))
            buffer[start:stop] = own
            _settle(buffer)
        else:
            for owner, span in enumerate(message.spans):
                _reduce_to(owner, comm, buffer, span, _op(message))

    def _alltoall(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        step = max(1, PIECE // comm.size)
        for done in range(0, max(b - a for a, b in message.spans), step):
            begins = [min(start + done, stop) for start, stop in message.spans]
            counts = [min(step, stop - begin) for begin, (_, stop) in zip(begins, message.spans)]
            begin, count = begins[comm.rank], counts[comm.rank]
            parts = self._like(buffer, "parts", max(PIECE, comm.size))[: comm.size * count]
            comm.Alltoallv([buffer, counts, begins, None], [parts, [count] * comm.size])
            total = buffer[begin : begin + count]
            total[:] = parts[:count]
            for other in range(1, comm.size):
                total += parts[other * count : (other + 1) * count]
            _settle(buffer)

    def _allgatherv(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        starts, counts = zip(*((start, stop - start) for start, stop in message.spans))
        if len(buffer) <= MAX_COUNT:
            comm.Allgatherv(MPI.IN_PLACE, [buffer, counts, starts, None])
        else:
            for root, span in enumerate(message.spans):
                _broadcast_from(root, comm, buffer, span)

    def _bcast(self, comm: MPI.Intracomm, buffer: Any, message: Message) -> None:
        for span in message.spans:
            _broadcast_from(message.root, comm, buffer, span)

    @contextmanager
    def _buffer(self, flat: Tensor, stage: str) -> Iterator[Any]:
        """What MPI may read and write in place of `flat`; copies are part of the stage."""
        if flat.is_cuda and self._direct and flat.dtype in SUMMABLE:  # our own sums are the host's
            _settle(flat)
            yield flat
            return
        with self._on_host(flat, stage, "host") as buffer:
            yield buffer

    @contextmanager
    def _on_host(self, flat: Tensor, stage: str, use: str) -> Iterator[Any]:
        """The same in the host's memory; `use` keeps buffers of threads apart."""
        if not flat.is_cuda:
            yield flat.numpy()
            return
        host = self._like(torch.empty(0, dtype=flat.dtype), use, flat.numel(), pinned=True)
        with self.trace.stage(stage):
            host.copy_(flat)
        yield host.numpy()
        with self.trace.stage(stage):
            flat.copy_(host)

    def _joined(self, buffer: Any, spans: Sequence[tuple[int, int]]) -> Any:
        """All spans in one piece, without a copy where they are."""
        first, last = spans[0][0], spans[-1][1]
        count = sum(stop - start for start, stop in spans)
        if last - first == count:
            return buffer[first:last]
        joined, end = self._like(buffer, "joined", count), 0
        for start, stop in spans:
            joined[end : end + stop - start] = buffer[start:stop]
            end += stop - start
        _settle(joined)
        return joined

    def _like(self, buffer: Any, use: str, count: int, pinned: bool = False) -> Any:
        """A kept buffer of the same kind as `buffer`, `[count]`."""
        if not isinstance(buffer, Tensor):
            return self._like(torch.from_numpy(buffer), use, count).numpy()
        kept = self._scratch.get((use, buffer.dtype))
        if kept is None or len(kept) < count:
            kept = torch.empty(count, dtype=buffer.dtype, device=buffer.device, pin_memory=pinned)
            self._scratch[use, buffer.dtype] = kept
        return kept[:count]


class Beside:
    """Messages of one arena that are sent beside the computation, each when its blocks are ready.

    Collective over: world, in any order and at any time.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        layout: Layout,
        send: Callable[[int], None],
        wait: Callable[[int], None],
    ) -> None:
        self._send, self._wait = send, wait
        self._message_of = {
            name: index
            for name, offset in layout.offsets.items()
            for index, message in enumerate(messages)
            if any(start <= offset < stop for start, stop in message.spans)
        }
        self._missing = Counter(self._message_of.values())
        self.ready_blocks: set[str] = set()

    def ready(self, block: str) -> None:
        """A block has its value, which must not change until `wait`.

        Raises:
            RuntimeError: it was ready before.
        """
        if block in self.ready_blocks:
            raise RuntimeError(
                f"{block!r} was sent before this backward pass; with overlap=True a step has one "
                f"backward pass, in which a layer is used once"
            )
        self.ready_blocks.add(block)
        index = self._message_of[block]
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._send(index)

    def wait(self) -> None:
        """Returns when all messages are sent; all blocks have to be ready."""
        for index in self._missing:
            self._wait(index)
        self._missing = Counter(self._message_of.values())
        self.ready_blocks.clear()


PRIMITIVES = {
    "Allreduce": Grid._allreduce,
    "Reduce": Grid._reduce,
    "Reduce_scatter": Grid._reduce_scatter,
    "Alltoall": Grid._alltoall,
    "Allgatherv": Grid._allgatherv,
    "Bcast": Grid._bcast,
}
"""What carries out a message, by the name that plans give it."""
SUMS = ("Allreduce", "Reduce", "Reduce_scatter")
"""Those of them that add up numbers of any codec that MPI can add up."""


def _add_bfloat16(part: Any, total: Any, _: MPI.Datatype) -> None:
    if len(part):  # MPI may ask for the sum of nothing, of which torch makes no tensor
        one, other = (torch.frombuffer(numbers, dtype=torch.bfloat16) for numbers in (part, total))
        other += one


BFLOAT16_SUM = MPI.Op.Create(_add_bfloat16, commute=True)


def _op(message: Message) -> MPI.Op:
    """What adds up; MPI knows no bfloat16 and takes it for whole numbers."""
    return BFLOAT16_SUM if message.codec else MPI.SUM


def _sleep_until(done: MPI.Request) -> None:
    """Returns when it is, calling MPI now and then."""
    while not done.Test():
        time.sleep(PAUSE)


def _settle(buffer: Any) -> None:
    """Waits for what fills a device buffer: DLPack hands over the pointer alone."""
    if isinstance(buffer, Tensor):
        torch.cuda.current_stream(buffer.device).synchronize()


def _reduce_to(
    root: int, comm: MPI.Intracomm, buffer: Any, span: tuple[int, int], op: MPI.Op
) -> None:
    for piece in _pieces(buffer, *span, PIECE):
        if comm.rank == root:
            comm.Reduce(MPI.IN_PLACE, piece, op, root)
        else:
            comm.Reduce(piece, None, op, root)


def _broadcast_from(root: int, comm: MPI.Intracomm, buffer: Any, span: tuple[int, int]) -> None:
    for piece in _pieces(buffer, *span, MAX_COUNT):
        comm.Bcast(piece, root=root)


def _handed(message: Message, rank: int) -> int:
    """Elements of a message that member `rank` hands to MPI."""
    if message.primitive == "Bcast" and rank != message.root:
        return 0
    spans = message.spans[rank : rank + 1] if message.primitive == "Allgatherv" else message.spans
    return sum(stop - start for start, stop in spans)


def _pieces(buffer: Any, start: int, stop: int, count: int) -> Iterator[Any]:
    for offset in range(start, stop, count):
        yield buffer[offset : min(offset + count, stop)]


def _check(flat: Tensor) -> None:
    if flat.dtype not in SUMMABLE:
        allowed = ", ".join(map(str, SUMMABLE))
        raise ValueError(f"dtype {flat.dtype} cannot be summed by MPI; use one of {allowed}")
    if not flat.is_contiguous():
        raise ValueError(f"a tensor of strides {flat.stride()} is not contiguous; copy it first")
