"""Write metrics.jsonl without losing lines to a full disk, a restart, or the removal of the file.

If another program truncates the file, the lines that it removes are lost; a warning is logged.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from mpikfac import files

log = logging.getLogger("mpikfac.train")


class MetricsFile:
    """The open metrics.jsonl of a run; lines that cannot be written wait in memory.

    Args:
        kept_bytes: the length of the file when the checkpoint to resume from was written; later
            bytes are cut off.
        waiting: lines that waited in memory when the checkpoint was written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, kept_bytes: int = 0, waiting: str = "") -> None:
        self._bytes, self._waiting = kept_bytes, b""
        self._file = files.writing(path, "end")
        self._path = files.anchored(path)
        if self._end() > kept_bytes:
            self._file.truncate(kept_bytes)
        self._mend(kept_bytes)
        self._add(waiting.encode())

    def add(self, line: str) -> None:
        """Append a line to the file or, if it cannot be written, to the lines in memory."""
        self._add(line.encode() + b"\n")

    def state(self) -> dict[str, int | str]:
        """Return items for a checkpoint: the number of bytes on disk, and the lines in memory."""
        self._add(b"")
        with suppress(OSError):
            os.fsync(self._file.fileno())
        return {"run/metrics_bytes": self._end(), "run/metrics_waiting": self._waiting.decode()}

    def _add(self, text: bytes) -> None:
        waited = bool(self._waiting)
        self._waiting += text
        try:
            self._follow()
            self._write()
        except OSError as error:
            if self._waiting and not waited:
                why = files.why(error)
                log.warning("metrics.jsonl cannot be written: %s; its lines wait in memory", why)

    def _write(self) -> None:
        """Write all lines in memory, or none, because a restart cannot read half a line."""
        end = self._end()
        try:
            files.write_all(self._file, self._waiting, self._path)
        except OSError:
            self._file.truncate(end)
            raise
        self._bytes += len(self._waiting)
        self._waiting = b""

    def _follow(self) -> None:
        """Create the file again if it was removed or replaced."""
        counted = self._bytes
        if not files.names(self._path, self._file):
            removed, content = not self._path.exists(), self._content()
            file = files.writing(self._path, "end")
            self._file.close()
            self._file = file
            if removed:
                counted, self._waiting = 0, content + self._waiting
            log.warning("metrics.jsonl was removed or replaced during the run; it is created again")
        self._mend(counted)

    def _mend(self, counted: int) -> None:
        """If the file was truncated, warn about lost lines, and cut off an incomplete last line."""
        if (on_disk := self._end()) < counted:
            self._file.truncate(self._content().rfind(b"\n") + 1)
            log.warning(
                "metrics.jsonl has only %d of the %d bytes that were written: lines have been lost",
                *(on_disk, counted),
            )
        elif on_disk > counted and not self._content().endswith(b"\n"):
            self._waiting = b"\n" + self._waiting

    def _content(self) -> bytes:
        """Return the content of the file, even if it was removed: the system keeps open files."""
        with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as file:
            return file.read()

    def _end(self) -> int:
        """Return the number of bytes on disk; if the disk does not respond, the last known one."""
        with suppress(OSError):
            self._bytes = self._file.seek(0, os.SEEK_END)
        return self._bytes


def state_on_disk(path: Path) -> dict[str, int | str]:
    """Return what `MetricsFile.state` would return, if the rank that wrote the file is lost.

    Raises:
        OSError: the file cannot be opened.
    """
    with files.writing(path, "end") as file:
        return {"run/metrics_bytes": file.seek(0, os.SEEK_END), "run/metrics_waiting": ""}
