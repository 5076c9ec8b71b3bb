"""The one exception type for users, and how a failing rank ends the job."""

from __future__ import annotations

import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

USAGE_ERROR = 2
CRASH = 1
PATIENCE = 2.0


class UserError(Exception):
    """A mistake that the user can mend; its text says what, which value, and what would be right.

    Raised on every rank with the same text, so that one rank can print it and all can leave.
    """


@contextmanager
def ending(comm: Any, where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """The whole job ends when the body fails on any rank; no rank is left waiting.

    A `UserError` (known to all ranks) is printed once as `mpikfac: ...` and every rank exits with
    code 2. Anything else is printed by the rank it happened on, its traceback and then one line
    that sums it up, and that rank aborts the job. Leaving by `SystemExit` counts as a failure too:
    the other ranks would wait.

    Args:
        where: what the rank is doing, such as "step 12", asked for when it fails.

    Collective over: none.
    """
    try:
        yield
    except UserError as error:
        if comm.rank == 0:
            print(f"mpikfac: {error}", file=sys.stderr, flush=True)
        # The first rank to leave may end the others, so they wait until rank 0 has printed.
        if not _all_here(comm):
            if comm.rank != 0:
                print(f"mpikfac: rank {comm.rank} alone: {error}", file=sys.stderr, flush=True)
            comm.Abort(USAGE_ERROR)
        raise SystemExit(USAGE_ERROR) from None
    except BaseException as error:
        place = ", ".join(
            filter(None, [f"rank {comm.rank} of {comm.size}", platform.node(), where()])
        )
        (what,) = traceback.format_exception_only(error)[-1:]
        report = f"{traceback.format_exc()}mpikfac: {place}: {' '.join(what.split())}\n"
        # In one write with the end of its line: the launcher puts notes of its own between two.
        print(report, end="", file=sys.stderr, flush=True)
        comm.Abort(CRASH)
        raise


def _all_here(comm: Any) -> bool:
    """Whether all ranks get here within `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    arrived = comm.Ibarrier()
    while not (here := arrived.Test()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(here)
