"""Find the processes of a job on this host by an environment variable that all of them have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path


def processes_with(variable: str) -> Iterator[int]:
    """Yield the ids of this user's processes whose environment has `variable`, as NAME=VALUE."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and variable.encode() in _words(name, "environ"):
            yield int(name)


def ranks_of(variable: str, command: Sequence[str]) -> list[int]:
    """Return the ids of a job's processes that run the command of the ranks, except their forks."""
    words = [word.encode() for word in command]
    same = [p for p in processes_with(variable) if _words(str(p), "cmdline")[: len(words)] == words]
    return [process for process in same if parent_of(process) not in same]


def parent_of(process: int) -> int:
    """Return the id of a process's parent, or 0 if the process has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])


def send(number: signal.Signals, targets: Sequence[int]) -> None:
    """Send a signal to those of the target processes that still exist."""
    for process in targets:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _words(process: str, file: str) -> list[bytes]:
    """Return the null-terminated words in /proc/PROCESS/FILE; none if the file cannot be read."""
    try:
        content = Path(f"/proc/{process}/{file}").read_bytes()
    except OSError:
        return []
    return content.rstrip(b"\0").split(b"\0")
