"""Show the progress of a study: how far the running cell is, and how much time remains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from mpikfac import files
from mpikfac_apps.lab.study import jobs
from mpikfac_apps.lab.study.spec import Cell

TAIL = 4096  # bytes to read at the end of metrics.jsonl; a line has about 200 bytes
LINE_EVERY = 60.0  # seconds between two lines of progress in a log
CLEAR = "\r\033[K"  # move to the start of a terminal's line, and clear it


class StudyProgress:
    """The progress of a study: one line, updated in place on a terminal; else a line per minute.

    The remaining time is an estimate: cells that have not run yet are assumed to take as long as
    complete cells on average, and the running cell to continue at its pace.

    Attributes:
        seconds: the time that each complete cell took, in this and in earlier starts of the study.
    """

    def __init__(self, cells: Sequence[Cell], directory: Path) -> None:
        self.cells, self.directory = cells, directory
        self.seconds: list[float] = []
        for cell in cells:
            ended = jobs.result(self._place(cell))
            if ended is not None and not ended.code:
                self.seconds.append(ended.seconds)
        self.on_terminal = sys.stdout.isatty()
        self._begun = self._shown = time.monotonic()

    def begin(self) -> None:
        """Start the clock of a cell."""
        self._begun = self._shown = time.monotonic()

    def look(self, number: int, cell: Cell) -> None:
        """Show the progress of the running cell, at position `number`; in a log, once a minute."""
        now = time.monotonic()
        if not self.on_terminal and now - self._shown < LINE_EVERY:
            return
        self._shown = now
        done = done_part(self._place(cell) / "run", cell)
        remaining = self._remaining(number, now - self._begun, done)
        words = f"{self.heading(number, cell)}: {done:.0%}{remaining}"
        line = files.printable(words)
        print(f"{CLEAR}{line}" if self.on_terminal else line, end="" if self.on_terminal else "\n")
        sys.stdout.flush()

    def end(self, number: int, cell: Cell, how: str, seconds: float | None) -> None:
        """Print `how` a cell ended; the `seconds` of a complete run are used for estimates."""
        if seconds is not None:
            self.seconds.append(seconds)
        remaining = self._remaining(number, 0.0, 1.0)
        line = files.printable(f"{self.heading(number, cell)}: {how}{remaining}")
        print(f"{CLEAR}{line}" if self.on_terminal else line, flush=True)

    def heading(self, number: int, cell: Cell) -> str:
        """Return a cell's number and name as text, with the total number of cells."""
        return f"[{number}/{len(self.cells)}] {cell.label}"

    def _remaining(self, number: int, elapsed: float, done: float) -> str:
        """Describe the remaining time of the study; "" if it is unknown or there is none."""
        waiting = sum(not self._complete(cell) for cell in self.cells[number:])
        here = elapsed * (1 - done) / done if done else None
        if self.seconds:
            per_cell = fmean(self.seconds)
        elif done:
            per_cell = elapsed / done
        else:
            return ""
        if not waiting and done == 1:
            return ""
        seconds = waiting * per_cell + (max(0.0, per_cell - elapsed) if here is None else here)
        return f"; about {in_words(seconds)} to go"

    def _complete(self, cell: Cell) -> bool:
        ended = jobs.result(self._place(cell))
        return ended is not None and not ended.code

    def _place(self, cell: Cell) -> Path:
        return self.directory / "cells" / cell.directory


def done_part(run: Path, cell: Cell) -> float:
    """Return the fraction of a run (0 to 1) that is complete according to its last metrics."""
    last = _last_line(run / "metrics.jsonl")
    options = cell.options
    parts = [last.get("epoch", 0) / options.epochs]
    if options.max_steps:
        parts.append(last.get("step", 0) / options.max_steps)
    return float(min(1.0, max(0.0, *parts)))


def _last_line(path: Path) -> dict[str, float]:
    """Return the last complete line of metrics; empty if there is none."""
    try:
        with files.reading(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).split(b"\n")
        row = files.json_of(lines[-2])
    except (OSError, IndexError, ValueError):
        return {}
    return row if files.has_form(row, {"epoch": float, "step": int}) else {}


def in_words(seconds: float) -> str:
    """Return seconds as a rough time: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
