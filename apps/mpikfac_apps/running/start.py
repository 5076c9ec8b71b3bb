"""Start a run: take cores, device, run directory and checkpoint, and take the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.place import RankPlace, share_cores
from mpikfac_apps.running import checkpoints, run_directory
from mpikfac_apps.running.loop import Loop


def run(
    comm: mpikfac.comm.Comm,
    options: RunOptions,
    watchdog: Watchdog,
    config: Mapping[str, Any],
    make: Callable[[Guard, torch.device], Loop],
) -> int:
    """Train from the start or from a checkpoint; return 0, or `stop_code` after a stop.

    The caller ends the job after an error: see `guard.ranks.run_on_ranks`.

    Collective over: comm.

    Args:
        config: the options for config.yaml.
        make: makes the run, without the state of a checkpoint; collective.

    Raises:
        UserError: directory, device or checkpoint cannot be used, or the training fails.
    """
    hosts = share_cores(comm, options.threads)
    with mpikfac.comm.together(comm, "options"):
        device = mpikfac.device(comm, options.device)
    watchdog.follow(options.hang_after)
    guard = Guard(comm, options, watchdog)
    with contextlib.closing(guard):
        early_log = run_directory.start_log() if comm.rank == 0 else None
        checkpoint = checkpoints.open_checkpoint(comm, options)
        loop = make(guard, device)
        kept = loop.restore(checkpoint)
        loop.open_record(early_log, RankPlace(device, hosts), config, *kept)
        return loop.train()
