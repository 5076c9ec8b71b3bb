"""The loop over the steps of a run: it writes metrics and checkpoints, and follows requests."""

from __future__ import annotations

import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac_apps.guard.guard import Guard
from mpikfac_apps.options.documents import flattened
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.place import RankPlace, environment
from mpikfac_apps.running import checkpoints, run_directory
from mpikfac_apps.running.metrics import Meter, Speed
from mpikfac_apps.running.votes import AnyTrainer, StepVotes
from mpikfac_apps.tracking.start import Start
from mpikfac_apps.tracking.tracker import Trackers

log = logging.getLogger("mpikfac.train")


class Loop(ABC):
    """Take the steps of a run, write metrics and checkpoints, and follow requests to save or stop.

    Each training program derives a class that defines a step, the test, when it is due, and the
    state.

    Collective over: comm, as are all methods.

    Args:
        steps: the number of steps of the whole run.
        meter: averages the losses and metrics.
        lr: returns the learning rate of a step.
        rate: the learning rate in the options, for error messages.

    Attributes:
        unit: what examples are called in metrics.jsonl.
        saver: writes the checkpoints.
        speed: the time spent in steps.
        votes: what ranks exchange together with the gradients.
        record: the open run directory on rank 0; None on other ranks.
    """

    unit = "examples"

    def __init__(
        self,
        comm: mpikfac.comm.Comm,
        options: RunOptions,
        guard: Guard,
        trainer: AnyTrainer,
        steps: int,
        meter: Meter,
        lr: Callable[[int], float],
        rate: float,
    ) -> None:
        self.comm, self.options, self.guard = comm, options, guard
        self.trainer, self.steps, self.meter = trainer, steps, meter
        self.lr, self.rate = lr, rate
        guard.stage = lambda: self.trainer.trace.current
        self.saver = checkpoints.Saver(comm, checkpoints.root(options), guard)
        self.speed = Speed(trainer.trace)
        self.votes = StepVotes(
            comm, options, guard, self.saver, trainer, self.call_meeting, self.asked
        )
        self.record: run_directory.Record | None = None
        if restarts := os.environ.get("SLURM_RESTART_COUNT"):
            log.info("restart %s of job %s", restarts, os.environ.get("SLURM_JOB_ID"))

    # -- what a program defines ------------------------------------------------------------------

    @abstractmethod
    def take(self, step: int) -> None:
        """Take a step, time it with `speed`, and add its loss to `meter`."""

    @abstractmethod
    def epochs(self, steps: int) -> float:
        """Return the number of epochs after `steps` steps; not collective."""

    @abstractmethod
    def test_due(self, steps: int) -> bool:
        """Return whether a test is due after `steps` steps; not collective."""

    @abstractmethod
    def test_after(self, steps: int) -> None:
        """Test the network after `steps` steps; write the results to metrics.jsonl and the log."""

    @abstractmethod
    def summary(self) -> str:
        """Return the first line of the log; not collective."""

    @abstractmethod
    def about(self) -> Mapping[str, Any]:
        """Return a description of the run for checkpoints, as JSON; on rank 0, not collective."""

    @abstractmethod
    def load(self, checkpoint: mpikfac.checkpoint.Checkpoint) -> None:
        """Load the result of `state` from a checkpoint.

        Raises:
            ValueError: an item is missing or invalid.
        """

    def state(self) -> dict[str, Any]:
        """Return this rank's part of the state for a checkpoint."""
        return self.trainer.state_dict()

    def of_records(self) -> dict[str, Any]:
        """Return additional items for a checkpoint, on rank 0 only; not collective."""
        return {}

    def numbers(self) -> dict[str, float]:
        """Return additional values for a line of metrics.jsonl; not collective."""
        return {}

    def call_meeting(self) -> None:  # noqa: B027 (most programs step together)
        """Send this rank's votes to all ranks, if ranks step independently; not collective."""

    def asked(self, votes: list[int]) -> list[int]:
        """Return the votes summed over all groups of ranks, if each group trains a network."""
        return votes

    @property
    def shows_progress(self) -> bool:
        """Whether this rank shows the progress of the run."""
        return self.record is not None

    @property
    def over(self) -> bool:
        """Whether the run ends early, before its last step."""
        return False

    @property
    def last_option(self) -> str:
        """The name of the option that sets the last step."""
        return "max_steps" if self.steps == self.options.max_steps else "epochs"

    def close(self) -> None:
        """Release the trainer, after the last checkpoint."""
        self.trainer.close()

    # -- steps -----------------------------------------------------------------------------------

    def train(self) -> int:
        """Take all remaining steps, or fewer after a request to stop; return the exit code."""
        first = self.trainer.steps
        log.info("%s", self.summary())
        progress = None
        if self.shows_progress:
            progress = run_directory.RunProgress(first, self.steps, self.epochs)
        stop = False
        for step in range(first, first if self.over else self.steps):
            self.guard.enter("step", step)
            self.votes.cast()
            self.take(step)
            if progress:
                progress.advance(self._describe)
            if (step + 1) % self.options.log_every == 0:
                self.report()
            if self.test_due(step + 1):
                self.guard.enter("evaluation", step)
                self.test_after(step + 1)
            if (stop := self.votes.follow(self.save)) or self.over:
                break
        if progress:
            progress.close()
        return self._end(stop)

    def set_rate(self, step: int) -> None:
        """Set the learning rate of a step in the optimizer; not collective."""
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.lr(step)

    def _end(self, stopped: bool) -> int:
        """Write the last checkpoint, and return the exit code."""
        self.trainer.average_replicas()
        steps, seconds = self.trainer.steps, self.speed.seconds
        stopped = stopped and steps < self.steps
        if not stopped and self.votes.troubled():
            raise mpikfac.UserError(
                f"a value in step {steps}, the last step, was not finite, so no checkpoint is "
                f"written; try an lr below {self.rate}"
            )
        self.guard.requests.ignore_signals()
        self.save(last=True)
        self.guard.enter("end", steps)
        self.saver.close()
        self.close()
        if self.comm.rank == 0:
            mpikfac.checkpoint.note_end(checkpoints.root(self.options))
        if self.record:
            self.record.close()
        self.comm.Barrier()  # while the watchdog runs, as MPI would wait for a stuck rank forever
        if not stopped:
            log.info("complete after %d steps, %.1f s", steps, seconds)
            return 0
        why = self.guard.requests.reason or "another rank received a request"
        code = self.options.exit_code
        # Open MPI reports every code except 0 as a failure.
        note = f"; exit code {code} is intended, whatever the launcher prints below" if code else ""
        log.info(
            "stopped after %d steps (%s); to continue, start the run again with --resume auto%s",
            *(steps, why, note),
        )
        return code

    # -- records ---------------------------------------------------------------------------------

    def open_record(
        self,
        early_log: MemoryHandler | None,
        place: RankPlace,
        config: Mapping[str, Any],
        kept_bytes: int = 0,
        waiting: str = "",
    ) -> None:
        """Open the run directory on rank 0; see `Record`."""
        with mpikfac.comm.together(self.comm, f"run_dir={self.options.run_dir}"):
            if early_log is None:
                return
            start = Start(Path(self.options.run_dir), self.trainer.steps, flattened(dict(config)))
            self.record = run_directory.Record(
                *(self.options, config, environment(place.hosts, place.device), early_log),
                *(Trackers(self.options.trackers, start), kept_bytes, waiting),
            )

    def report(self) -> None:
        """Write a row of metrics for the steps since the last report."""
        loss = self.meter.recent()
        speed, communication = self.speed.rates()
        self.speed.mark()
        speeds = {f"{self.unit}_per_second": speed, "communication": communication}
        self.row(loss=loss, **speeds, **self.numbers())

    def row(self, **values: float) -> None:
        """Add a row to metrics.jsonl; not collective."""
        if self.record:
            steps, seconds = self.trainer.steps, self.speed.seconds
            place = {"epoch": self.epochs(steps), "seconds": seconds, "lr": self.lr(steps - 1)}
            self.record.row(steps, **place, **values)

    def _describe(self) -> str:
        speed, communication = self.speed.rates()
        loss = "" if math.isnan(self.meter.loss) else f"loss {self.meter.loss:.4f}, "
        return f"{loss}{speed:,.0f} {self.unit}/s, {communication:.0%} communication"

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, last: bool = False) -> None:
        """Start writing a checkpoint; if it is the last of a run, wait until it is on disk."""
        self.guard.enter("checkpoint", self.trainer.steps)
        self.trainer.average_replicas()  # a checkpoint has one model
        items = self.state() | self.meter.state()
        self.saver.save(items | self.items_of_rank_0(), self.trainer.steps, last)

    def items_of_rank_0(self) -> dict[str, Any]:
        """Return the items of a checkpoint that only rank 0 writes; none on other ranks."""
        if self.comm.rank != 0:
            return {}
        lost = run_directory.state_of_a_lost_rank
        metrics = self.record.state() if self.record else lost(self.options.run_dir)
        about = json.dumps(self.about())
        seconds = self.speed.seconds
        return {"run/data": about, "run/seconds": seconds, **self.of_records(), **metrics}

    def restore(self, checkpoint: mpikfac.checkpoint.Checkpoint | None) -> tuple[int, str]:
        """Restore the state from a checkpoint, if any.

        Return how many bytes of metrics.jsonl to keep, and the lines not yet written to it.

        Raises:
            UserError: the checkpoint does not belong to this run.
        """
        if checkpoint is None:
            return 0, ""
        metrics = 0, ""
        doing = f"reading checkpoint {checkpoint.path}"
        with mpikfac.comm.together(self.comm, doing, untrusted=True):
            self.load(checkpoint)
            steps = self.trainer.steps, checkpoint.step, self.steps
            checkpoints.check_steps(*steps, self.last_option)
            items: Mapping[str, Any] = checkpoint  # an item's name determines its type
            self.meter.load(items["run/counted"], items["run/reported"])
            self.speed.seconds, size, waiting = checkpoints.records(checkpoint)
            self.speed.mark()
            if self.options.resume == "auto":
                metrics = size, waiting
                self.saver.step = checkpoint.step
                if self.comm.rank == 0:
                    mpikfac.checkpoint.note_start(checkpoint)
        log.info("continuing from %s", checkpoint.path)
        return metrics
