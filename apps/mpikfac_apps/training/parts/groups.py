"""Divide the ranks of a run into groups; each trains a model in a subfolder of run_dir."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import mpikfac
from mpikfac_apps.options.options import Options
from mpikfac_apps.running import checkpoints


def joined(comm: mpikfac.comm.Comm, options: Options) -> tuple[mpikfac.comm.Comm, Options]:
    """Return the communicator of this rank's group, and the options of the group's run.

    Consecutive ranks form a group, as in `mpikfac.lab.Codistillation`. Each group has its own seed
    and run directory.

    Collective over: comm.
    """
    groups = options.codistillation.groups
    if groups == 1:
        return comm, options
    number = comm.rank * groups // comm.size
    folder, resume = f"group-{number}", options.resume
    if resume not in ("never", "auto"):
        resume = str(Path(resume) / folder)
    run_dir = str(Path(options.run_dir) / folder)
    of_group = dataclasses.replace(
        options, seed=options.seed + number, run_dir=run_dir, resume=resume
    )
    return cast(mpikfac.comm.Comm, comm.Split(number, comm.rank)), of_group


def open_checkpoint(
    world: mpikfac.comm.Comm, comm: mpikfac.comm.Comm, options: Options
) -> mpikfac.checkpoint.Checkpoint | None:
    """Return the checkpoint to resume from, of the same step in all groups; None to start at 0.

    The steps of the groups' newest checkpoints can differ, because a job may end before all groups
    have written a checkpoint.

    Collective over: world.

    Args:
        world: the ranks of all groups.
        comm: the ranks of this rank's group.

    Raises:
        UserError: see `checkpoints.open_checkpoint`; or the groups have no checkpoints of the same
            step.
    """
    checkpoint = checkpoints.open_checkpoint(comm, options)
    if options.codistillation.groups == 1:
        return checkpoint
    skip: set[str] = set()
    while len(steps := {*world.allgather(checkpoint.step if checkpoint else -1)}) > 1:
        if options.resume != "auto" or checkpoint is None or min(steps) < 0:
            break
        if checkpoint.step > min(steps):
            skip.add(checkpoint.path.name)
            checkpoint = mpikfac.find_checkpoint(comm, checkpoints.root(options), skip)
    if len(steps) > 1:
        words = " and ".join(f"step {step}" if step >= 0 else "none" for step in sorted(steps))
        raise mpikfac.UserError(
            f"the groups have no checkpoints of the same step ({words}); use a different run_dir"
        )
    return checkpoint


def writer(options: Options) -> str:
    """Return the prefix of log lines on the screen: the group if there are several, or ""."""
    return f"{Path(options.run_dir).name}: " if options.codistillation.groups > 1 else ""
