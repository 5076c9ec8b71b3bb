"""End a job that makes no progress, and write every rank's stacks to files.

At the limit, a Python thread of each rank reports the rank's place (`reports.py`). If the GIL is
held, a rank's Python cannot run. A C thread (of faulthandler) then writes the stacks and exits,
because the C thread needs no GIL. After the first exit, the launcher ends all remaining ranks,
stopped ranks too (`launcher.py`). No rank waits for a second rank in this module.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mpikfac.trace import COMMUNICATION
from mpikfac_apps.guard.launcher import end_launcher
from mpikfac_apps.guard.reports import RankReport, Reports, screen

LONGER = 10  # times the limit of a step: for the first step, and for phases without steps
TICK = 0.1  # seconds between two looks at the clock
# Seconds after the limit, when the reports are complete.
UNABLE = 1.7, 2.0  # in between, ranks with a blocked Python write stacks and exit
LEAVE = 2.3  # all ranks exit
LAUNCHER = 20.0  # the launcher is asked to leave, if it still waits for a host


class Watchdog:
    """End a job that makes no progress, and write all stacks; a crash writes the rank's stacks too.

    Args:
        reports: the files of the job's reports.
        limit: seconds that a step may take; None for no limit.
        stage: returns the name of the running stage.
    """

    def __init__(self, reports: Reports, limit: float | None, stage: Callable[[], str]) -> None:
        self._reports, self._limit, self._stage = reports, limit, stage
        self._stepped = self._ending = False
        self._where, self._deadline = ("start-up", 0, math.inf), math.inf
        self._lock = threading.Lock()  # progress comes either in time or too late
        self._last = 0.0  # time at which the C thread acts
        self._closed = threading.Event()
        self._write_step, self._write_deadline = 0, math.inf
        self._unfinished: Callable[[], bool] = lambda: False
        # File descriptors, because a C thread writes to them.
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.enable(reports.file)
        self.enter("start-up", 0)
        if limit is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """Begin a phase of a step on all ranks: "step", or a longer phase."""
        with self._lock:
            if self._limit is None or self._ending:
                return
            short = phase == "step" and self._stepped
            self._stepped = self._stepped or phase == "step"
            seconds = self._limit if short else LONGER * self._limit
            self._where = phase, step, seconds
            now = time.monotonic()
            self._deadline = now + seconds
            # Setting the timer takes 40 us, and more on a busy core: too long for each of many
            # short steps.
            if not UNABLE[0] <= self._last - self._deadline <= UNABLE[1]:
                last = self._deadline + UNABLE[1]
                with suppress(RuntimeError):  # no thread can start now; the next phase tries again
                    faulthandler.dump_traceback_later(
                        last - now, exit=True, file=self._reports.file
                    )
                    self._last = last

    def begin_write(self, step: int, unfinished: Callable[[], bool]) -> None:
        """Begin to write a checkpoint beside the steps, on all ranks.

        The checkpoint may take as long as a checkpoint for which the steps wait.

        Args:
            unfinished: returns whether this rank still writes.
        """
        with self._lock:
            if self._limit is not None:
                self._write_step, self._unfinished = step, unfinished
                self._write_deadline = time.monotonic() + LONGER * self._limit

    def end_write(self) -> None:
        """End the write on all ranks."""
        with self._lock:
            self._write_deadline = math.inf

    def close(self) -> None:
        """End the watch, and remove this rank's file unless the file has content."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(screen())  # from now on a crash prints its stack to stderr
        self._reports.close()
        os.close(self._nowhere)

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                self._ending = time.monotonic() >= min(self._deadline, self._write_deadline)
                if self._ending:  # exit even if this thread gets stuck
                    with suppress(RuntimeError):
                        faulthandler.dump_traceback_later(LEAVE, exit=True, file=self._nowhere)
            if self._ending:
                end_launcher(LAUNCHER)
                self._reports.report(*self._late())
                return

    def _late(self) -> tuple[RankReport, float]:
        """Return this rank's place, and the limit that is over.

        A write beside the steps ends with a step of all ranks. A rank that has written, and is in a
        longer phase, may be the one that keeps the other ranks from this step.
        """
        phase, step, seconds = self._where
        stage = self._stage()
        waits = stage in COMMUNICATION
        if self._write_deadline < self._deadline:
            assert self._limit is not None
            seconds = LONGER * self._limit
            if self._unfinished():
                phase, step, stage, waits = "checkpoint", self._write_step, "write", False
            elif phase == "step":
                phase, step, stage, waits = "checkpoint", self._write_step, "", True
        return {"phase": phase, "step": step, "stage": stage, "waits": waits}, seconds
