"""Determine where a run starts: at step 0, or at a checkpoint from which it resumes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import torch

import mpikfac
from mpikfac_apps.options.documents import flattened
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import resolved
from mpikfac_apps.training import carried, settings
from mpikfac_apps.training.parts import groups

CHECKSUMS = "images", "pixels", "tests"

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class Restart:
    """Where a run starts, and what it keeps from its first start.

    Attributes:
        options: the options of this start, with the values that a restart must keep.
        ranks: the number of ranks of the first start; a restart with a different number keeps batch
            size and learning rate.
        checkpoint: the checkpoint to resume from; None at step 0.
        images: the checksums of the images, from the checkpoint; empty at step 0.
    """

    options: Options
    ranks: int
    checkpoint: mpikfac.checkpoint.Checkpoint | None = None
    images: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The number of the last step that was taken, counted from 0; 0 if there was none."""
        return max(0, self.checkpoint.step - 1) if self.checkpoint else 0

    def report_carried(self, comm: mpikfac.comm.Comm, trainer: object) -> None:
        """Log which parts of the checkpoint are used, if another preconditioner wrote it.

        Call this method after the checkpoint has been loaded.

        Collective over: comm.
        """
        if self.checkpoint is None or not isinstance(trainer, mpikfac.KFAC):
            return
        before = settings.saved_run(self.checkpoint).get("settings", {})
        now = settings.about_run(self.options, comm.size)["settings"]
        if before.get(settings.PRECONDITIONER, ...) not in (..., now[settings.PRECONDITIONER]):
            log.info(
                "the preconditioner has changed; continued: %s; restarted: %s; dropped: %s",
                *carried.carried(comm, trainer, self.checkpoint),
            )


def find_restart(world: mpikfac.comm.Comm, comm: mpikfac.comm.Comm, options: Options) -> Restart:
    """Return where the run starts, with the options that a restart must keep.

    All options that differ from those of the checkpoint are logged.

    Collective over: world.

    Args:
        world: the ranks of all groups.
        comm: the ranks that train one network together.

    Raises:
        UserError: the checkpoint is damaged, or an option that a restart must keep differs; see
            `settings.follow`.
    """
    checkpoint = groups.open_checkpoint(world, comm, options)
    if checkpoint is None:
        return Restart(replace(options, batch_per_rank=None), comm.size)
    doing = f"reading checkpoint {checkpoint.path}"
    with mpikfac.comm.together(comm, doing, untrusted=True):
        saved = settings.saved_run(checkpoint)
        options = settings.follow(options, saved, comm.size)
        images = {key: saved[key] for key in CHECKSUMS if key in saved}
        if (threads := torch.get_num_threads()) != saved["threads"]:
            log.info(
                "the run was started with threads=%d, now %d: rounding may differ",
                saved["threads"],
                threads,
            )
        before = settings.of_saved(saved, checkpoint.path)
        _report(checkpoint, before, resolved(options, comm.size))
    return Restart(replace(options, batch_per_rank=None), saved["ranks"], checkpoint, images)


def _report(
    checkpoint: mpikfac.checkpoint.Checkpoint,
    before: settings.RunSettings | None,
    now: Mapping[str, Any],
) -> None:
    """Log which version wrote the checkpoint, if another one, and which options differ."""
    if checkpoint.writer not in ("", version := f"mpikfac {metadata.version('mpikfac')}"):
        log.info("the checkpoint was written by %s; this is %s", checkpoint.writer, version)
    if before is None:
        log.info("the checkpoint has no settings: options that are not set take their defaults")
    elif words := settings.changes(before.resolved, flattened(now)):
        log.info("step %d: changed since the checkpoint: %s", checkpoint.step, words)
