"""Run a program on all ranks of a job, under a watchdog from the first thing that may wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import mpikfac
from mpikfac_apps.cli import mend_streams, read_options
from mpikfac_apps.guard.reports import Reports
from mpikfac_apps.guard.watchdog import Watchdog

Options = TypeVar("Options")
Work = Callable[[mpikfac.comm.Comm, Options, Watchdog], int]


def watched(comm: mpikfac.comm.Comm) -> closing[Watchdog]:
    """Return a context with the watchdog of this rank, which reports to stderr."""
    return closing(Watchdog(Reports(None, comm.rank, comm.size)))


def run_on_ranks(parse: Callable[[int], Options], work: Work[Options]) -> int:
    """Return the exit code of a program's work on all ranks; a failure of a rank ends the job.

    Collective over: world.

    Args:
        parse: makes the options on rank 0, from the number of ranks.
        work: tells the watchdog of the phases.

    Raises:
        SystemExit: code 2 after a single line about a mistake that the user can correct.
    """

    def together(comm: mpikfac.comm.Comm, options: Options, watchdog: Watchdog) -> int:
        with mpikfac.abort_on_error(comm):
            return work(comm, options, watchdog)

    return run_watched(parse, together)


def run_watched(parse: Callable[[int], Options], work: Work[Options]) -> int:
    """Return the exit code of a program's work on all ranks; 0 after a call for help.

    Collective over: world.

    Args:
        parse: makes the options on rank 0, from the number of ranks.
        work: tells the watchdog of the phases, and ends the job if a rank fails.

    Raises:
        SystemExit: code 2 after a single line about a mistake that the user can correct.
    """
    mend_streams()
    comm = mpikfac.world()
    with watched(comm) as watchdog:
        with mpikfac.abort_on_error(comm):
            options = read_options(comm, lambda: parse(comm.size))
        code = 0 if options is None else work(comm, options, watchdog)
        return mpikfac.comm.leaving(code)
