"""Ends a job that makes no progress, and leaves every rank's stack.

    RUN/hang/rank-2.txt     where rank 2 was, in one line of JSON, and the stacks of its threads
    RUN/hang/summary.txt    the line that was printed for all

At the limit a thread of Python writes the report of its rank; a second later the first of the ranks
prints where they all were. A rank whose Python cannot run, because the GIL is held, is left to a
thread of C (faulthandler's), which needs no GIL to write the stacks and to leave. When one rank has
left, the launcher ends the others, stopped ones too. No rank waits for another one here.
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

LONGER = 10  # times the limit of a step: for the first one, and for what is no step
TICK = 0.1  # seconds between two looks at the clock
# Seconds after the limit: ranks that wait for each other reach theirs nearly at once.
SUMMARY = 1.0  # the reports are there
UNABLE = 1.4, 1.7  # in between: ranks whose Python cannot run write their stacks and leave
LEAVE = 2.2  # all ranks leave


def set_aside(directory: Path) -> None:
    """Renames the reports of an earlier start, if there are any.

    For one rank, before any makes its `Watchdog`.
    """
    if any(path.stat().st_size for path in directory.glob("*")):
        ended = time.localtime(directory.stat().st_mtime)
        directory.rename(f"{directory}-{time.strftime('%Y%m%d-%H%M%S', ended)}")
    else:
        shutil.rmtree(directory, ignore_errors=True)


class Watchdog:
    """Ends a job that makes no progress, and leaves every rank's stack; a crash leaves it, too.

    Args:
        directory: of the reports, the same on all ranks.
        limit: seconds that a step may take; None: for ever.
        stage: names what runs now.

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
        self._lock = threading.Lock()  # progress comes in time, or too late
        self._last = 0.0  # when the thread of C comes in
        self._closed = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        # Descriptors, as a thread of C writes to them.
        self._report = os.open(self._path(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.enable(self._report)
        self.enter("start-up", 0)
        if limit is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """From now on all ranks are in this phase, "step" or a longer one, of this step."""
        with self._lock:
            if self._limit is None or self._ending:
                return
            short = phase == "step" and self._stepped
            self._stepped = self._stepped or phase == "step"
            seconds = self._limit if short else LONGER * self._limit
            self._where = phase, step, seconds
            now = time.monotonic()
            self._deadline = now + seconds
            # To set it takes 40 us, and more on a busy core: so not in each of many short steps.
            if not UNABLE[0] <= self._last - self._deadline <= UNABLE[1]:
                self._last = self._deadline + UNABLE[1]
                faulthandler.dump_traceback_later(self._last - now, exit=True, file=self._report)

    def close(self) -> None:
        """Ends the watch, and removes this rank's file unless something was written to it."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(2)  # from here on a crash leaves its stack on stderr
        if not os.fstat(self._report).st_size:
            self._path(self._rank).unlink(missing_ok=True)
        os.close(self._report)
        os.close(self._nowhere)
        with suppress(OSError):
            self._directory.rmdir()  # by the last of the ranks

    def _watch(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                self._ending = time.monotonic() >= self._deadline
                if self._ending:  # whatever happens to this thread from here on
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
            return  # another rank was the first
        with file:
            seconds = self._where[2]
            places = summary([self._read(rank) for rank in range(self._ranks)])
            line = f"no progress for {seconds:g} s: {places}; stacks in {self._directory}\n"
            os.write(2, f"mpikfac: {line}".encode())  # sys.stderr might be locked by what hangs
            file.write(line)

    def _write_report(self) -> None:
        phase, step, _ = self._where
        place = {"phase": phase, "step": step, "stage": self._stage()}
        about = {"host": platform.node(), "pid": os.getpid(), **place}
        os.write(self._report, json.dumps(about).encode() + b"\n")
        faulthandler.dump_traceback(self._report)
        os.fsync(self._report)  # else other hosts may not see it

    def _read(self, rank: int) -> dict[str, Any] | None:
        """What the rank reported, if it could."""
        try:
            with open(self._path(rank)) as file:
                return json.loads(file.readline())
        except (OSError, ValueError):
            return None

    def _path(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.txt"


def summary(reports: Sequence[Mapping[str, Any] | None]) -> str:
    """Where the ranks were: those that computed, those that are silent, those that waited."""
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
    """Such as "rank 2 on node5" or "ranks 0-3, 5"."""
    if len(ranks) == 1:
        report = reports[ranks[0]]
        return f"rank {ranks[0]}" + (f" on {report['host']}" if report else "")
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda p: p[1] - p[0])
    ]
    return "ranks " + ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
