"""Make ranks agree on errors, settings, values and a clock."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm.messages.buffers import MAX_COUNT, pieces
from mpikfac.comm.mpi import MPI
from mpikfac.errors import RankLostError, RanksDifferError, UserError

CLOCK_READINGS = 50  # only the fastest round trip counts, as most are slow on a busy machine


@contextmanager
def together(comm: MPI.Intracomm, doing: str, untrusted: bool = False) -> Iterator[None]:
    """Raise the same `UserError` on every rank if the body raises an error on any rank.

    Catches errors in files and data (`OSError`, `ValueError`, `UserError`). All ranks raise
    an error with the message of the lowest failing rank, preceded by `doing`; a
    `RanksDifferError` keeps its type.

    Args:
        doing: what the body does, such as "reading checkpoint runs/step-000000120".
        untrusted: whether the body parses the content of a file; if so, a missing key, a wrong
            type or a wrong shape also counts as an error in the data.

    Collective over: comm.
    """
    failure: tuple[type[UserError], str] | None = None
    cause: Exception | None = None
    try:
        yield
    except (OSError, ValueError, UserError) as error:
        kind = RanksDifferError if isinstance(error, RanksDifferError) else UserError
        failure, cause = (kind, str(error)), error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        if not untrusted or isinstance(error, (MPI.Exception, RankLostError)):
            raise
        about = " ".join(str(error).split())
        text = f"the content has an unexpected form: {type(error).__name__}: {about}"
        failure, cause = (UserError, text), error
    failures = [failure for failure in comm.allgather(failure) if failure is not None]
    if failures:
        kind, text = failures[0]
        raise kind(f"{doing}: {text}") from cause


def agree(comm: MPI.Intracomm, values: Mapping[str, object]) -> None:
    """Check that all `values`, compared by their `repr`, are the same on every rank.

    Collective over: comm.

    Raises:
        RanksDifferError: some values differ; the message contains the first key whose values
            differ, both values, and their ranks.
    """
    printed = {key: repr(value) for key, value in values.items()}
    first, *following = comm.allgather(printed)
    for rank, texts in enumerate(following, start=1):
        for key in [*first, *texts]:
            if first.get(key) != texts.get(key):
                raise RanksDifferError(
                    f"ranks disagree on {key}: {first.get(key)} on rank 0, {texts.get(key)} on "
                    f"rank {rank}; start all ranks with the same code, configuration and versions"
                )


def summed(comm: MPI.Intracomm, numbers: Sequence[float]) -> list[float]:
    """Sum a few values over ranks, in rank order, so that all ranks get bitwise equal sums.

    Collective over: comm.
    """
    return [sum(column) for column in zip(*comm.allgather(list(numbers)))]


def handed_over(
    comm: MPI.Intracomm, held: Mapping[str, Any], needed: Collection[str]
) -> dict[str, Any]:
    """Return the items named in `needed`, each from the lowest rank whose `held` contains it.

    Items that no rank holds are left out. The items are tensors or plain values; tensors arrive in
    host memory.

    Collective over: comm.
    """
    items, ranks = {}, comm.allgather((set(held), set(needed)))
    for name in sorted(set().union(*(names for _, names in ranks))):
        source = next((rank for rank, (names, _) in enumerate(ranks) if name in names), None)
        if source is not None:
            value = _passed_on(comm, held.get(name), source)
            if name in needed:
                items[name] = value
    return items


def _passed_on(comm: MPI.Intracomm, value: Any, source: int) -> Any:
    """Broadcast a tensor of any size, or a plain value, from rank `source`, and return it."""
    form = (value.shape, value.dtype) if torch.is_tensor(value) else None
    form, number = comm.bcast((form, None if form else value), root=source)
    if form is None:
        return number
    host = torch.empty(form[0], dtype=form[1], device="cpu")
    if comm.rank == source:
        host.copy_(value)
    _broadcast_bytes(comm, host, source)
    return host


def broadcast(comm: MPI.Intracomm, tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's tensors to every rank.

    Collective over: comm.
    """
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        _broadcast_bytes(comm, host, 0)
        if comm.rank:
            # An expanded dimension has stride 0: its elements share memory, so only one is copied.
            with torch.no_grad():
                places = tuple(slice(None if stride else 1) for stride in tensor.stride())
                tensor[places].copy_(host[places])


def _broadcast_bytes(comm: MPI.Intracomm, host: Tensor, root: int) -> None:
    # Not host.numpy(): a tensor that shares its memory with NumPy cannot be resized.
    content = host.view(-1).view(torch.uint8)
    for piece in pieces(content, 0, len(content), MAX_COUNT):
        comm.Bcast(piece, root=root)


def clock_offset(comm: MPI.Intracomm) -> float:
    """Return the seconds to add to this rank's `time.perf_counter` to get rank 0's.

    The error is at most half of the shortest round trip measured.

    Collective over: comm.
    """
    clock = array("d", [0.0])
    if comm.rank == 0:
        for rank in range(1, comm.size):  # one at a time, so that no message waits for another
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
