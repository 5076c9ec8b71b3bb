"""Functions for streams, error messages, files and checkpoints, shared by all programs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import mpikfac
from mpikfac import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(program: str, work: Callable[[], int]) -> int:
    """Run a program's work, and return its exit code.

    If its input is invalid, print an error on a single line, and return 2.
    """
    mend_streams()
    try:
        return work()
    except (OSError, ValueError) as error:
        complain(program, error)
        return 2


def mend_streams() -> None:
    """Redirect closed standard streams to the null device; escape text that cannot be encoded.

    If a stream stayed closed, a file opened later would get the stream's descriptor, and text
    written to the stream would end up in that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def complain(program: str, error: Exception) -> None:
    """Print an error on a single line, with unprintable characters escaped."""
    print(files.printable(f"{program}: {error}"), file=sys.stderr)


def path_of(text: str, *kinds: str) -> Path:
    """Return `text` as a path, after checking its suffix.

    Args:
        kinds: allowed suffixes, such as ".csv".

    Raises:
        ValueError: the path has a different suffix.
    """
    path = Path(text)
    if path.suffix not in kinds:
        *first, last = kinds
        words = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{path} must end in {words}")
    return path


def picture(text: str) -> Path:
    """Return `text` as the path of a picture: .pdf, .png or .svg.

    Raises:
        ValueError: the path has a different suffix.
    """
    return path_of(text, ".pdf", ".png", ".svg")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure to a file, in the format given by the file's suffix.

    Raises:
        OSError: the file cannot be written.
    """
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=120)
    files.write_bytes(path, image.getvalue(), named=True)


def checkpoint_at(path: Path) -> Path:
    """Return the directory of a checkpoint: `path` itself, or the newest checkpoint of a run.

    Raises:
        ValueError: the path contains no complete checkpoint.
    """
    if (path / "manifest.json").exists():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (newest := mpikfac.checkpoint.latest_checkpoint(root)):
            return newest
    raise ValueError(
        f"{path} contains no complete checkpoint; pass the directory of a checkpoint or of a run"
    )
