"""Execute a plan's messages with MPI's blocking collectives, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm.messages.buffers import MAX_COUNT, Buffers, pieces, synchronize
from mpikfac.comm.mpi import MPI
from mpikfac.plan import PASSED, PIECE, Message, Passed, passed


def _add_bfloat16(part: Any, total: Any, _: MPI.Datatype) -> None:
    if len(part):  # MPI can request a sum of 0 elements; torch.frombuffer rejects an empty buffer
        terms, sums = (torch.frombuffer(numbers, dtype=torch.bfloat16) for numbers in (part, total))
        sums += terms


@cache
def bfloat16_sum() -> MPI.Op:
    """Return the operation that adds bfloat16 values, which MPI receives as integers."""
    return MPI.Op.Create(_add_bfloat16, commute=True)


def op_of(message: Message) -> MPI.Op:
    """Return the operation with which MPI reduces a message."""
    return bfloat16_sum() if message.codec else MPI.SUM


def _allreduce(comm: MPI.Intracomm, buffer: Any, message: Message, _: Buffers) -> None:
    ((start, stop),) = message.spans
    for piece in pieces(buffer, start, stop, PIECE):
        comm.Allreduce(MPI.IN_PLACE, piece, op_of(message))


def _reduce(comm: MPI.Intracomm, buffer: Any, message: Message, _: Buffers) -> None:
    for span in message.spans:
        _reduce_to(message.root, comm, buffer, span, op_of(message))


def _reduce_scatter(comm: MPI.Intracomm, buffer: Any, message: Message, buffers: Buffers) -> None:
    total = sum(stop - start for start, stop in message.spans)
    turns = -(-total // PIECE)
    for turn in range(turns):  # each round reduces the same fraction of every span
        spans = [_share(span, turn, turns) for span in message.spans]
        start, stop = spans[comm.rank]
        counts = [stop - start for start, stop in spans]
        part = buffers.like(buffer, "sum", stop - start)
        comm.Reduce_scatter(buffers.joined(buffer, spans), part, counts, op_of(message))
        buffer[start:stop] = part
        synchronize(buffer)


def _share(span: tuple[int, int], turn: int, turns: int) -> tuple[int, int]:
    start, stop = span
    size = stop - start
    return start + size * turn // turns, start + size * (turn + 1) // turns


def _alltoall(comm: MPI.Intracomm, buffer: Any, message: Message, buffers: Buffers) -> None:
    step = max(1, PIECE // comm.size)
    for done in range(0, max(b - a for a, b in message.spans), step):
        begins = [min(start + done, stop) for start, stop in message.spans]
        counts = [min(step, stop - begin) for begin, (_, stop) in zip(begins, message.spans)]
        begin, count = begins[comm.rank], counts[comm.rank]
        parts = buffers.like(buffer, "parts", max(PIECE, comm.size))[: comm.size * count]
        sent = [buffer, counts, begins, None]
        if len(buffer) > MAX_COUNT:  # larger displacements do not fit into MPI's integers
            spans = [(begin, begin + count) for begin, count in zip(begins, counts)]
            sent = [buffers.joined(buffer, spans), counts]
        comm.Alltoallv(sent, [parts, [count] * comm.size])
        total = buffer[begin : begin + count]
        total[:] = parts[:count]
        for member in range(1, comm.size):
            total += parts[member * count : (member + 1) * count]
        synchronize(buffer)


def _allgatherv(comm: MPI.Intracomm, buffer: Any, message: Message, _: Buffers) -> None:
    starts, counts = zip(*((start, stop - start) for start, stop in message.spans))
    if len(buffer) <= MAX_COUNT:
        comm.Allgatherv(MPI.IN_PLACE, [buffer, counts, starts, None])
    else:
        for root, span in enumerate(message.spans):
            _broadcast_from(root, comm, buffer, span)


def _pass_on(comm: MPI.Intracomm, buffer: Any, message: Message, _: Buffers) -> None:
    def parts(moves: list[Passed]) -> Iterator[tuple[Passed, Any]]:
        return ((m, part) for m in moves for part in pieces(buffer, m.start, m.stop, MAX_COUNT))

    moves = passed(message.spans, message.to)
    incoming = parts([move for move in moves if move.target == comm.rank])
    outgoing = parts([move for move in moves if move.source == comm.rank])
    requests = [comm.Irecv(part, move.source) for move, part in incoming]
    requests += [comm.Isend(part, move.target) for move, part in outgoing]
    for request in requests:
        request.Wait()


def _bcast(comm: MPI.Intracomm, buffer: Any, message: Message, _: Buffers) -> None:
    for span in message.spans:
        _broadcast_from(message.root, comm, buffer, span)


def _reduce_to(
    root: int, comm: MPI.Intracomm, buffer: Any, span: tuple[int, int], op: MPI.Op
) -> None:
    for piece in pieces(buffer, *span, PIECE):
        if comm.rank == root:
            comm.Reduce(MPI.IN_PLACE, piece, op, root)
        else:
            comm.Reduce(piece, None, op, root)


def _broadcast_from(root: int, comm: MPI.Intracomm, buffer: Any, span: tuple[int, int]) -> None:
    for piece in pieces(buffer, *span, MAX_COUNT):
        comm.Bcast(piece, root=root)


PRIMITIVES = {
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Reduce_scatter": _reduce_scatter,
    "Alltoall": _alltoall,
    "Allgatherv": _allgatherv,
    "Bcast": _bcast,
    PASSED: _pass_on,
}
"""The functions that execute a message, by the name of its primitive in the plan."""
SUMS = ("Allreduce", "Reduce", "Reduce_scatter")
"""Primitives in which MPI itself reduces values, including values compressed to bfloat16."""
COPIES = ("Allgatherv", "Bcast", PASSED)
"""Primitives that copy values of any dtype."""


def sent_elements(message: Message, rank: int) -> int:
    """Return how many of a message's elements member `rank` of its communicator passes to MPI."""
    if message.primitive == PASSED:
        return sum(m.size for m in passed(message.spans, message.to) if m.source == rank)
    silent = message.primitive == "Bcast" and rank != message.root
    spans = message.spans[rank : rank + 1] if message.primitive == "Allgatherv" else message.spans
    return 0 if silent else sum(stop - start for start, stop in spans)


def sum_in_order(comm: MPI.Intracomm, parts: Tensor, total: Tensor) -> None:
    """Set `total` to the sum of all ranks' `parts` `[n, len(total)]`, in rank order.

    All tensors are in host memory.

    Collective over: comm.
    """
    last = comm.size - 1
    for start in range(0, len(total), PIECE):
        piece = total[start : start + PIECE]
        if comm.rank:
            comm.Recv(piece.numpy(), source=comm.rank - 1)
        else:
            piece.zero_()
        for part in parts:
            piece += part[start : start + PIECE]
        if comm.rank != last:
            comm.Send(piece.numpy(), dest=comm.rank + 1)
    for piece in pieces(total, 0, len(total), PIECE):
        comm.Bcast(piece.numpy(), root=last)
