"""End a job that makes no progress, and write every rank's stacks to files.

    RUN/hang/rank-2.txt     the place of rank 2, in one line of JSON, and the stacks of all threads
    RUN/hang/summary.txt    the printed line about all ranks

At the limit, a Python thread of each rank writes the rank's report. A second later, the first rank
to try prints the places of all ranks. If the GIL is held, a rank's Python cannot run. A C thread
(of faulthandler) then writes the stacks and exits, because the C thread needs no GIL. After the
first exit, the launcher ends all remaining ranks, stopped ranks too. No rank waits for a second
rank in this module.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from mpikfac.trace import COMMUNICATION

LONGER = 10  # times the limit of a step: for the first step, and for phases without steps
TICK = 0.1  # seconds between two looks at the clock
# Seconds after the limit: ranks that wait for each other reach their limits at nearly one time.
SUMMARY = 1.0  # the reports are complete
UNABLE = 1.4, 1.7  # in between, ranks with a blocked Python write stacks and exit
LEAVE = 2.2  # all ranks exit


def set_aside(directory: Path) -> None:
    """Rename the reports of an earlier start, if any.

    Call the function on one rank, before any rank makes a `Watchdog`.
    """
    if any(path.stat().st_size for path in directory.glob("*")):
        ended = time.localtime(directory.stat().st_mtime)
        directory.rename(f"{directory}-{time.strftime('%Y%m%d-%H%M%S', ended)}")
    else:
        shutil.rmtree(directory, ignore_errors=True)


class Watchdog:
    """End a job that makes no progress, and write all stacks; a crash writes the rank's stacks too.

    Args:
        directory: folder of the reports, the same on all ranks.
        limit: seconds that a step may take; None for no limit.
        stage: returns the name of the running stage.

    Raises:
        OSError: this rank's file cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        ranks: int,
        limit: float | None,
        stage: Callable[[], str],
    ) -> None:
        self._directory, self._rank, self._ranks = directory, rank, ranks
        self._limit, self._stage = limit, stage
        self._stepped = self._ending = False
        self._lock = threading.Lock()  # progress comes either in time or too late
        self._last = 0.0  # time at which the C thread acts
        self._closed = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        # File descriptors, because a C thread writes to them.
        self._report = os.open(self._path(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.enable(self._report)
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
                self._last = self._deadline + UNABLE[1]
                faulthandler.dump_traceback_later(self._last - now, exit=True, file=self._report)

    def close(self) -> None:
        """End the watch, and remove this rank's file unless the file has content."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(2)  # from now on a crash prints its stack to stderr
        if not os.fstat(self._report).st_size:
            self._path(self._rank).unlink(missing_ok=True)
        os.close(self._report)
        os.close(self._nowhere)
        with suppress(OSError):
            self._directory.rmdir()  # the last rank succeeds

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                self._ending = time.monotonic() >= self._deadline
                if self._ending:  # exit even if this thread gets stuck
                    faulthandler.dump_traceback_later(LEAVE, exit=True, file=self._nowhere)
            if self._ending:
                self._tell()
                return

    def _tell(self) -> None:
        self._write_report()
        time.sleep(SUMMARY)
        try:
            file = open(self._directory / "summary.txt", "x")  # noqa: SIM115 (to name the cause)
        except FileExistsError:
            return  # a second rank was first
        with file:
            seconds = self._where[2]
            places = summary([self._read(rank) for rank in range(self._ranks)])
            line = f"no progress for {seconds:g} s: {places}; stacks in {self._directory}\n"
            os.write(2, f"mpikfac: {line}".encode())  # sys.stderr may be locked for ever
            file.write(line)

    def _write_report(self) -> None:
        phase, step, _ = self._where
        place = {"phase": phase, "step": step, "stage": self._stage()}
        about = {"host": platform.node(), "pid": os.getpid(), **place}
        os.write(self._report, json.dumps(about).encode() + b"\n")
        faulthandler.dump_traceback(self._report)
        os.fsync(self._report)  # else the file may be invisible on other hosts

    def _read(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report; None if the rank could not write."""
        try:
            with open(self._path(rank)) as file:
                return json.loads(file.readline())
        except (OSError, ValueError):
            return None

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.txt"


def summary(reports: Sequence[Mapping[str, Any] | None]) -> str:
    """Return the ranks' places: first computing ranks, then silent ranks, then waiting ranks."""
    found: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        if report is None:
            found[1, "silent (stopped, holding the GIL, or at its end)"].append(rank)
        elif report["stage"] in COMMUNICATION:
            found[2, f"waiting in {_place(**report)}"].append(rank)
        else:
            found[0, f"in {_place(**report)}"].append(rank)
    groups = [f"{_named(found[key], reports)} {key[1]}" for key in sorted(found)]
    return "; ".join(groups)


def _place(phase: str, step: int, stage: str, **_: object) -> str:
    where = f"step {step}" if phase == "step" else f"{phase} at step {step}"
    return f'"{stage}" of {where}' if stage else where


def _named(ranks: list[int], reports: Sequence[Mapping[str, Any] | None]) -> str:
    """Return names such as "rank 2 on node5" or "ranks 0-3, 5"."""
    if len(ranks) == 1:
        report = reports[ranks[0]]
        return f"rank {ranks[0]}" + (f" on {report['host']}" if report else "")
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda p: p[1] - p[0])
    ]
    return "ranks " + ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
