"""Write checkpoints of a run, survive failed writes, and find the checkpoint to resume from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac_apps.cli import checkpoint_at
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.guard.watchdog import LONGER
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.running import run_directory

RECORDS = {"run/seconds": float, "run/metrics_bytes": int, "run/metrics_waiting": str}

log = logging.getLogger("mpikfac.train")


class Saver:
    """Write checkpoints during training, which continues if a checkpoint cannot be written.

    Collective over: comm, as are all methods.

    Attributes:
        step: the step of the last checkpoint that was started or resumed from; -1 if there is none,
            or if writing it failed.
    """

    def __init__(self, comm: mpikfac.comm.Comm, root: Path, guard: Guard) -> None:
        self.step = -1
        self._writer = mpikfac.CheckpointWriter(comm, root)
        self._guard = guard
        self._began = self._reminded = 0.0

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is begun but not committed; equal on all ranks, not collective."""
        return self._writer.pending

    @property
    def written(self) -> bool:
        """Whether the rank has written its part of the pending checkpoint; not collective."""
        return self._writer.written

    def save(self, items: Mapping[str, Any], step: int, last: bool = False) -> None:
        """Start writing a checkpoint; if it is the last of a run, wait until it is on disk.

        Raises:
            UserError: the last checkpoint of the run cannot be written, or ranks hold different
                values of the same item.
        """
        self.settle(last and self.step == step)
        bare = self._is_bare()
        if self.step == step and not bare:
            return
        self._began = self._reminded = self._guard.clock()
        self._guard.begin_write(step, lambda: not self.written)
        try:
            self._writer.begin(items, step)
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        self.step = step
        if last:
            self.settle(last)

    def settle(self, last: bool = False) -> None:
        """Wait until all ranks have written the pending checkpoint, and commit it."""
        try:
            path = self._writer.commit()
        except mpikfac.UserError as error:
            self._failed(error, last)
            return
        if path:
            self._guard.end_write()
            seconds = self._guard.clock() - self._began
            self._guard.requests.saved(seconds)
            log.info("wrote %s in %.1f s", path, seconds)

    def remind(self, written: int, late: int, limit: float | None) -> None:
        """Warn about a checkpoint that takes too long, once per `limit` seconds; not collective.

        Args:
            written: the number of ranks that have written their parts of the checkpoint.
            late: the sum of `rank + 1` over the ranks that are still writing.
            limit: the watchdog's time limit in seconds; None for no warnings.
        """
        now = self._guard.clock()
        if not self.pending or limit is None or now - self._reminded < limit:
            return
        self._reminded = now
        writing = self._writer.comm.size - written
        who = f"rank {late - 1} is" if writing == 1 else f"{writing} ranks are"
        log.warning(
            "%s still writing a checkpoint of step %d, begun %d s ago; training continues, and the "
            "job ends after %d s",
            *(who, self.step, now - self._began, LONGER * limit),
        )

    def abandon(self) -> None:
        """Drop the pending checkpoint, because lost ranks' parts may be missing; not collective."""
        self._guard.end_write()
        self._writer.abandon()

    def close(self) -> None:
        """Wait until older checkpoints are deleted; not collective."""
        self._writer.close()

    def _is_bare(self) -> bool:
        """Return whether the directory had checkpoints in this start, but rank 0 finds none now."""
        root = self._writer.root
        bare = self._writer.comm.bcast(self.step >= 0 and _is_empty(root))
        if bare:
            log.warning("%s was emptied or removed during the run, and is created again", root)
        return bool(bare)

    def _failed(self, error: mpikfac.UserError, last: bool) -> None:
        """Continue without the failed checkpoint; end the run if later ones would fail, too.

        Raises:
            UserError: it was the last checkpoint of the run, or ranks hold different values of the
                same item.
        """
        self.step = -1
        self._guard.end_write()
        self._guard.requests.saved(self._guard.clock() - self._began)
        if isinstance(error, mpikfac.RanksDifferError):
            raise mpikfac.UserError(
                f"{error}; the run ends, because the ranks would continue to differ; restart it "
                f"with --resume auto to continue from the last checkpoint"
            ) from error
        if last:
            raise error
        log.warning("%s; training continues, and the next checkpoint is written when due", error)


def open_checkpoint(
    comm: mpikfac.comm.Comm, options: RunOptions
) -> mpikfac.checkpoint.Checkpoint | None:
    """Return the checkpoint to resume from, or None to start at step 0.

    Collective over: comm.

    Raises:
        UserError: the checkpoint that `resume` names is damaged, all checkpoints of the run are
            damaged, or a run that had checkpoints has none.
    """
    if options.resume == "never":
        return None
    if options.resume != "auto":
        with mpikfac.comm.together(comm, f"resume={options.resume}"):
            path = checkpoint_at(Path(options.resume)) if comm.rank == 0 else None
        return mpikfac.load_checkpoint(comm, comm.bcast(path))
    checkpoint = mpikfac.find_checkpoint(comm, root(options))
    if checkpoint is None:
        with mpikfac.comm.together(comm, f"run_dir={options.run_dir}"):
            if comm.rank == 0:
                run_directory.start_anew(Path(options.run_dir))
    return checkpoint


def root(options: RunOptions) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(options.run_dir) / "checkpoints"


def records(checkpoint: mpikfac.checkpoint.Checkpoint) -> tuple[float, int, str]:
    """Return the seconds of training, the bytes of metrics.jsonl, and lines not yet written to it.

    Raises:
        ValueError: a number is missing or negative, or an item has the wrong type.
    """
    items = {name: checkpoint.get(name, "") for name in RECORDS}
    if not files.has_form(items, RECORDS) or not all(items[name] >= 0 for name in list(items)[:2]):
        raise ValueError(f"items {', '.join(RECORDS)} must be two numbers >= 0 and a string")
    seconds, size, waiting = items.values()
    return seconds, size, waiting


def check_steps(steps: int, named: int, end: int, limit: str) -> None:
    """Raise ValueError if a checkpoint's two step counts differ, or exceed the end of the run.

    Args:
        steps: the step count of the trainer's state.
        named: the step in the checkpoint's manifest.
        end: the number of steps of the whole run.
        limit: the name of the option that sets `end`.
    """
    if steps != named:
        raise ValueError(f"item 'trainer/steps' is {steps}; the manifest has step {named}")
    if steps > end:
        raise ValueError(f"it has step {steps}, but this run ends at step {end}; raise {limit}")


def _is_empty(root: Path) -> bool:
    """Return whether a directory has no checkpoints; False if it cannot be read."""
    try:
        return not any(root.glob("step-*"))
    except OSError:  # writing a checkpoint will report the cause
        return False
