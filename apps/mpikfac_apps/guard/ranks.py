"""Run a program on all ranks of a job; a watchdog starts before the first call that can block."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import torch

import mpikfac
from mpikfac_apps.cli import mend_streams
from mpikfac_apps.guard.reports import Reports
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options import pickled

Options = TypeVar("Options")
Work = Callable[[mpikfac.comm.Comm, Options, Watchdog], int]


def connected() -> mpikfac.comm.Comm:
    """Return the communicator of all ranks; under `torchrun`, connect them first.

    Collective over: world.
    """
    if mpikfac.comm.TORCHRUN in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    return mpikfac.world()


def watched(comm: mpikfac.comm.Comm) -> closing[Watchdog]:
    """Return a context manager for this rank's watchdog, which reports to stderr."""
    return closing(Watchdog(Reports(None, comm.rank, comm.size)))


def run_on_ranks(parse: Callable[[int], Options], work: Work[Options]) -> int:
    """Run a program on all ranks, and return its exit code; an error on any rank ends the job.

    Collective over: world.

    Args:
        parse: creates the options on rank 0, from the number of ranks.
        work: does the work, and tells the watchdog about its phases.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """

    def together(comm: mpikfac.comm.Comm, options: Options, watchdog: Watchdog) -> int:
        with mpikfac.abort_on_error(comm):
            return work(comm, options, watchdog)

    return run_watched(parse, together)


def run_watched(parse: Callable[[int], Options], work: Work[Options]) -> int:
    """Run a program on all ranks, and return its exit code; 0 if only help was requested.

    Collective over: world.

    Args:
        parse: creates the options on rank 0, from the number of ranks.
        work: does the work, tells the watchdog about its phases, and ends the job if a rank fails.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """
    mend_streams()
    comm = connected()
    with watched(comm) as watchdog:
        with mpikfac.abort_on_error(comm):
            options = read_options(comm, lambda: parse(comm.size))
        code = 0 if options is None else work(comm, options, watchdog)
        return mpikfac.comm.leaving(code)


def read_options(comm: mpikfac.comm.Comm, parse: Callable[[], Options]) -> Options | None:
    """Parse the options on rank 0, and return them on every rank; None after `--help`.

    If the options name types as FILE.py:CLASS, every rank executes these files.

    Collective over: comm.

    Raises:
        UserError: `parse` raised a ValueError, or a rank cannot execute such a file.
    """
    options = None
    with mpikfac.comm.together(comm, "options"):
        if comm.rank == 0:
            try:
                options = parse()
            except SystemExit as leave:
                if leave.code:
                    raise
    content = comm.bcast(pickled.dumps(options) if comm.rank == 0 else b"")
    with mpikfac.comm.together(comm, "options"):
        if comm.rank != 0:
            try:
                options = pickled.loads(content)
            except ValueError as error:
                raise ValueError(
                    f"on rank {comm.rank}, {error}; every rank needs the file and what it imports"
                ) from error
    return options
