"""End a job that makes no progress, and write every rank's stacks.

When the time limit is reached, a Python thread on each rank reports its position (`reports.py`),
and the rank exits. While the GIL is held, Python threads cannot run. The process that counts the
time (`counter.py`) then requests the rank's stacks with a signal, which does not need the GIL, and
finally kills the rank. After the first rank exits, the launcher ends all others, including stopped
ones (`launcher.py`). In this module, no rank waits for another.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from mpikfac.trace import COMMUNICATION
from mpikfac_apps.guard.clock import Clock
from mpikfac_apps.guard.counter import STACKS
from mpikfac_apps.guard.launcher import end_launcher
from mpikfac_apps.guard.reports import RankReport, Reports, screen

LIMIT = 600.0  # the time limit of a step in seconds, until the options are known
LONGER = 10  # multiplies the time limit in the first step, and in phases other than steps
TICK = 0.1  # seconds between two checks of the clock
LEAVE = 2.3  # seconds from the limit until a rank exits; by then, the reports are complete
LAUNCHER = 20.0  # seconds from the limit until a launcher that still waits for a host is ended
TOLD = 1.0  # seconds; if the process was stopped for a shorter time, this is not logged

log = logging.getLogger("mpikfac.train")


class Watchdog:
    """End a job that makes no progress, and write all stacks; also write the stacks of a crash.

    The constructor starts the watch, in the phase "start-up".

    Args:
        reports: where positions and stacks are written.
        limit: the maximum duration of a step in seconds; None for no limit.
        stage: returns the name of the current stage of a step.

    Attributes:
        clock: the clock of all time limits; time in which the rank is stopped does not count.
    """

    def __init__(
        self, reports: Reports, limit: float | None = LIMIT, stage: Callable[[], str] = lambda: ""
    ) -> None:
        self.clock = Clock()
        self._first = self._reports = reports
        self._limit, self._stage = limit, stage
        self._stepped = self._ending = False
        self._where, self._deadline = ("start-up", 0, math.inf), math.inf
        self._lock = threading.Lock()  # so that a phase begins either in time or too late
        self._closed = threading.Event()
        self._write_step, self._write_deadline = 0, math.inf
        self._unfinished: Callable[[], bool] = lambda: False
        self.follow(limit, stage)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def follow(
        self,
        limit: float | None,
        stage: Callable[[], str] = lambda: "",
        reports: Reports | None = None,
    ) -> None:
        """Begin another start-up phase with a new limit; without `reports`, use the first ones."""
        with self._lock:
            former, self._reports = self._reports, reports or self._first
            self._limit, self._stage, self._stepped = limit, stage, False
            self._deadline = self._write_deadline = math.inf
            self._set_deadline()
            faulthandler.enable(self._reports.file)
            faulthandler.register(STACKS, self._reports.file)
            if former not in (self._first, self._reports):
                former.close()
        self.enter("start-up", 0)

    def enter(self, phase: str, step: int) -> None:
        """Record that all ranks begin a phase: "step", or a different one with a longer limit."""
        with self._lock:
            if self._limit is None or self._ending:
                return
            short = phase == "step" and self._stepped
            self._stepped = self._stepped or phase == "step"
            seconds = self._limit if short else LONGER * self._limit
            self._where = phase, step, seconds
            self._deadline = self.clock() + seconds
            self._set_deadline()

    def begin_write(self, step: int, unfinished: Callable[[], bool]) -> None:
        """Record that all ranks begin to write a checkpoint in the background.

        The time limit is the same as for a checkpoint that is written in the foreground.

        Args:
            unfinished: returns whether this rank is still writing.
        """
        with self._lock:
            if self._limit is not None:
                self._write_step, self._unfinished = step, unfinished
                self._write_deadline = self.clock() + LONGER * self._limit
                self._set_deadline()

    def end_write(self) -> None:
        """Record that all ranks have finished writing the checkpoint."""
        with self._lock:
            self._write_deadline = math.inf
            self._set_deadline()

    def close(self) -> None:
        """End the watch, and close the reports."""
        self._closed.set()
        self._thread.join()
        self.clock.close()
        faulthandler.unregister(STACKS)
        faulthandler.enable(screen())  # from now on, a crash prints its stacks to stderr
        for reports in {self._first, self._reports}:
            reports.close()

    def _set_deadline(self) -> None:
        if not self._ending:
            self.clock.alarm(min(self._deadline, self._write_deadline))

    def _watch(self) -> None:
        try:
            self._look_until_closed()
        except Exception as error:
            log.exception(
                "the watchdog failed with %s: hangs are no longer detected", type(error).__name__
            )

    def _look_until_closed(self) -> None:
        told, counts = 0.0, True
        while not self._closed.wait(TICK):
            if self.clock.stopped - told > TOLD:
                log.info(
                    "the process was stopped for %.0f s; this time does not count",
                    self.clock.stopped - told,
                )
                told = self.clock.stopped
            if counts and not self.clock.runs:
                counts = False
                log.warning(
                    "the watchdog's clock has failed: hangs are no longer detected; restart the run"
                )
            with self._lock:
                self._ending = self.clock() >= min(self._deadline, self._write_deadline)
            if self._ending:
                self._end()

    def _end(self) -> None:
        """Report this rank's position, and exit."""
        began = time.monotonic()
        self.clock.alarm(self.clock() + LEAVE)  # in case this thread gets stuck, too
        end_launcher(LAUNCHER)
        self._reports.report(*self._late())
        time.sleep(max(0.0, began + LEAVE - time.monotonic()))
        os._exit(1)

    def _late(self) -> tuple[RankReport, float]:
        """Return this rank's position, and the limit that was exceeded.

        The writing of a checkpoint in the background ends in a step that all ranks take. A rank
        that has finished writing, and is in a phase other than a step, might be the one that
        prevents the other ranks from reaching this step, so its phase is reported.
        """
        phase, step, seconds = self._where
        stage = self._stage()
        waits = stage in COMMUNICATION
        if self._write_deadline <= self._deadline:
            assert self._limit is not None
            seconds = LONGER * self._limit
            if self._unfinished():
                phase, step, stage, waits = "checkpoint", self._write_step, "write", False
            elif phase == "step":
                phase, step, stage, waits = "checkpoint", self._write_step, "", True
        return {"phase": phase, "step": step, "stage": stage, "waits": waits}, seconds
