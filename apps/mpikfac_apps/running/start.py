"""Run a training program: read the options, guard the run directory, and take the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.ranks import run_watched
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.place import RankPlace, share_cores
from mpikfac_apps.running import checkpoints, run_directory
from mpikfac_apps.running.loop import Loop

Options = TypeVar("Options")
Make = Callable[[mpikfac.comm.Comm, Options, Guard, torch.device], Loop]


def start(
    parse: Callable[[int], Options],
    of_run: Callable[[Options], RunOptions],
    make: Make[Options],
    config: Callable[[Options], Mapping[str, Any]],
) -> int:
    """Run a training program on all ranks; return 0, or the option `exit_code` after a stop.

    Collective over: world.

    Args:
        parse: creates the options on rank 0, from the number of ranks.
        of_run: returns the options about the run directory, the end of the run, and the device.
        make: creates the training loop on every rank; collective.
        config: returns all options in the nested form of a YAML file.

    Raises:
        SystemExit: with code 2, after a one-line message about an error that the user can correct.
    """

    def work(comm: mpikfac.comm.Comm, options: Options, watchdog: Watchdog) -> int:
        with mpikfac.abort_on_error(comm):
            place, guard = settle(comm, of_run(options), watchdog)
        with mpikfac.abort_on_error(comm, guard.where), contextlib.closing(guard):
            early_log = run_directory.start_log() if comm.rank == 0 else None
            checkpoint = checkpoints.open_checkpoint(comm, of_run(options))
            loop = make(comm, options, guard, place.device)
            kept = loop.restore(checkpoint)
            loop.open_record(early_log, place, config(options), *kept)
            return loop.train()

    return run_watched(parse, work)


def settle(
    comm: mpikfac.comm.Comm, options: RunOptions, watchdog: Watchdog
) -> tuple[RankPlace, Guard]:
    """Divide each node's cores and GPUs among its ranks, and claim the run directory.

    Collective over: comm.

    Raises:
        UserError: the device or the run directory cannot be used.
    """
    watchdog.follow(options.watchdog_timeout)
    hosts = share_cores(comm, options.threads)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, options.device)
    return RankPlace(device, hosts), Guard(comm, options, watchdog)
