"""Report where the ranks of a hanging job are, in files and in a single line on stderr.

    RUN/hang/rank-2.txt     the position of rank 2, as a line of JSON, and the stacks of all threads
    RUN/hang/summary.txt    the printed line about all ranks

In this module, no rank waits for another. The file system might be full or not respond. A rank that
cannot write its file, or has no run directory yet, prints its position and stacks to stderr.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from mpikfac import files

# Seconds after the time limit, which ranks that wait for each other reach almost simultaneously:
ANSWER = 0.6  # a file system that has not written the report by now is considered hung
SUMMARY = 1.0  # the reports are complete; rank 0 prints the summary
OTHERS = 1.25  # if rank 0 has not printed the summary, another rank does

RankReport = dict[str, Any]
FORM = {"phase": str, "step": int, "stage": str, "waits": bool, "host": str}


def set_aside(directory: Path) -> None:
    """Rename the directory with the reports of an earlier start, if it contains any.

    Call this function on one rank, before any rank creates its `Reports`.
    """
    if any(path.lstat().st_size for path in directory.glob("*")):
        ended = time.localtime(directory.stat().st_mtime)
        directory.rename(f"{directory}-{time.strftime('%Y%m%d-%H%M%S', ended)}")
    else:
        shutil.rmtree(directory, ignore_errors=True)


class Reports:
    """Write one rank's report on a hanging job, and print a summary of the reports of all ranks.

    Args:
        directory: the folder of the reports, the same on all ranks; None to report only to stderr.

    Attributes:
        file: the descriptor of this rank's file, or of stderr, to which a C thread can write.

    Raises:
        OSError: this rank's file cannot be created.
    """

    def __init__(self, directory: Path | None, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._screen = self.file = screen()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._opened = files.writing(directory / name_of(rank))
            self.file = self._opened.fileno()
        self._directory = directory
        self._memory = os.memfd_create("stacks")  # later, there might be no file descriptor left

    def close(self) -> None:
        """Remove this rank's file if it is empty."""
        os.close(self._memory)
        if self._directory is None:
            return
        empty = not os.fstat(self.file).st_size
        self._opened.close()
        with suppress(OSError):  # for example, if the file system has become read-only
            if empty:
                (self._directory / name_of(self._rank)).unlink(missing_ok=True)
            self._directory.rmdir()  # succeeds only on the rank that closes last

    def report(self, place: RankReport, seconds: float) -> None:
        """Report that this rank has made no progress for `seconds` at `place`, and print a line."""
        began, stacks = time.monotonic(), self._stacks()
        about = place | {"host": platform.node(), "pid": os.getpid()}
        here = f"no progress for {seconds:g} s: rank {self._rank} on {platform.node()}"
        here = f"{here} {_doing(place)}; stacks below"
        if self._directory is None:
            self._print(f"{here}\n", stacks)
            return
        file = self._directory / name_of(self._rank)
        if failure := self._write(file, json.dumps(about).encode() + b"\n" + stacks):
            self._print(f"{here}, as {file} cannot be written: {failure}\n", stacks)
        else:
            turn = OTHERS if self._rank else SUMMARY
            time.sleep(max(0.0, began + turn - time.monotonic()))
            self._summarise(self._directory, seconds)

    def _write(self, path: Path, report: bytes) -> str:
        """Write this rank's file at `path`; return why this failed, or "" if it did not."""
        failure = [f"no answer in {ANSWER:g} s"]

        def write() -> None:
            try:
                files.write_all(self._opened, report, path)
                os.fsync(self.file)  # otherwise, other hosts might not see the file
                if not files.names(path, self._opened):
                    raise OSError(errno.ENOENT, "the file was moved or removed")
                failure[0] = ""
            except OSError as error:
                failure[0] = files.why(error)

        writer = threading.Thread(target=write, name="report", daemon=True)
        writer.start()
        writer.join(ANSWER)
        return failure[0]

    def _stacks(self) -> bytes:
        """Return the stacks of all threads of this process."""
        faulthandler.dump_traceback(self._memory)
        os.lseek(self._memory, 0, os.SEEK_SET)
        return os.read(self._memory, 2**20)

    def _summarise(self, directory: Path, seconds: float) -> None:
        """Print the positions of all ranks, unless another rank has done so."""
        try:
            file = files.writing(directory / "summary.txt", "new")
        except OSError:
            return
        places = summary([_read(directory / name_of(rank)) for rank in range(self._ranks)])
        message = f"no progress for {seconds:g} s: {places}; stacks in {directory}"
        line = f"{files.printable(message)}\n"
        self._print(line)
        with suppress(OSError):
            file.write(line.encode())

    def _print(self, line: str, stacks: bytes = b"") -> None:
        with suppress(OSError):  # sys.stderr might be locked forever
            os.write(self._screen, f"mpikfac: {line}".encode() + stacks)


def _read(path: Path) -> RankReport | None:
    """Return the report in a rank's file, or None if it has no valid report."""
    try:
        with files.reading(path) as file:
            report: RankReport = files.json_of(file.readline(files.SMALL))
    except (OSError, ValueError):
        return None
    return report if files.has_form(report, FORM) else None


def name_of(rank: int) -> str:
    """Return the name of a rank's report file."""
    return f"rank-{rank}.txt"


def screen() -> int:
    """Return the file descriptor of stderr, or of the null device if there is no stderr."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError):
        return os.open(os.devnull, os.O_WRONLY)


def summary(reports: Sequence[RankReport | None]) -> str:
    """Return the positions of all ranks: computing ranks first, then silent, then waiting ones."""
    ranks_by_place: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, report in enumerate(reports):
        if report is None:
            ranks_by_place[1, "silent (stopped, holding the GIL, or at its end)"].append(rank)
        else:
            ranks_by_place[2 * report["waits"], _doing(report)].append(rank)
    groups = [f"{_named(ranks_by_place[key], reports)} {key[1]}" for key in sorted(ranks_by_place)]
    return "; ".join(groups)


def _doing(place: Mapping[str, Any]) -> str:
    phase, step, stage = place["phase"], place["step"], place["stage"]
    where = f"step {step}" if phase == "step" else f"{phase} at step {step}"
    where = f'"{stage}" of {where}' if stage else where
    return f"waiting in {where}" if place["waits"] else f"in {where}"


def _named(ranks: list[int], reports: Sequence[RankReport | None]) -> str:
    """Return names such as "rank 2 on node5" or "ranks 0-3, 5"."""
    if len(ranks) == 1:
        report = reports[ranks[0]]
        return f"rank {ranks[0]}" + (f" on {report['host']}" if report else "")
    runs = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda p: p[1] - p[0])
    ]
    return "ranks " + ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
