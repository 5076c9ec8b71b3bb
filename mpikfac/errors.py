"""Define exceptions for user errors and lost ranks, and end a job in which a rank fails."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mpikfac.files import printable, printable_lines

USAGE_ERROR = 2
CRASH = 1
PATIENCE = 2.0


class UserError(Exception):
    """Report a mistake that the user can correct; the message states what would be valid.

    Every rank raises it with the same text; one rank prints the text, and all ranks exit. The text
    is a single printable line, even if part of it comes from a file.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class RanksDifferError(UserError):
    """Report that values that must be equal on all ranks differ.

    Retrying does not help: the values differ until one rank's values are copied to the others.
    """


class RankLostError(RuntimeError):
    """Report that a message failed because another rank has ended or does not take part.

    This error is only a consequence; the other rank, or the launcher, reports the cause.
    """


class _Ranks(Protocol):
    """Describe the methods of a communicator that `abort_on_error` calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def Ibarrier(self) -> Any: ...

    def Abort(self, errorcode: int = 0) -> Any: ...


@contextmanager
def abort_on_error(comm: _Ranks, where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """End the whole job if the body fails on any rank, so that no rank is left waiting.

    A `UserError` (known to all ranks) is printed once as `mpikfac: ...`, and every rank exits with
    code 2. After any other exception, the failing rank prints the traceback and a one-line summary,
    and aborts the job with code 1. `SystemExit` counts as a failure as well, because the other
    ranks would wait forever. In a single-rank job, a `KeyboardInterrupt` is re-raised.

    Args:
        where: returns what the rank is doing, such as "step 12"; called after a failure.

    Collective over: none.
    """
    try:
        yield
    except UserError as error:
        if comm.rank == 0:
            print(f"mpikfac: {error}", file=sys.stderr, flush=True)
        # The first rank to exit can end the others, so every rank waits until rank 0 has printed.
        if not _all_arrived(comm):
            if comm.rank != 0:
                print(f"mpikfac: only on rank {comm.rank}: {error}", file=sys.stderr, flush=True)
            comm.Abort(USAGE_ERROR)
        raise SystemExit(USAGE_ERROR) from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and comm.size == 1:
            raise  # no other rank waits, and a notebook can continue
        place = ", ".join(
            filter(None, [f"rank {comm.rank} of {comm.size}", platform.node(), where()])
        )
        (summary,) = traceback.format_exception_only(error)[-1:]
        trace = printable_lines(traceback.format_exc())
        report = f"{trace}mpikfac: {place}: {printable(' '.join(summary.split()))}\n"
        # A single write, including the newline, because the launcher can insert its own output
        # between writes.
        print(report, end="", file=sys.stderr, flush=True)
        comm.Abort(CRASH)
        raise SystemExit(CRASH) from None  # with some MPI libraries, Abort returns


def _all_arrived(comm: _Ranks) -> bool:
    """Return whether all ranks call this function within `PATIENCE` seconds."""
    barrier = comm.Ibarrier()
    return any(barrier.Test() for _ in looks(PATIENCE))


def looks(seconds: float, interval: float = 0.01) -> Iterator[None]:
    """Yield every `interval` seconds, for `seconds` in total.

    The intervals are counted, because a clock would keep running while the job is suspended.
    """
    for _ in range(round(seconds / interval)):
        yield
        time.sleep(interval)
