"""Checkpoint directories: each has its final name only when all of it is on disk.

    root/.step-000000120.partial    being written, or left by a run that was killed
    root/step-000000120             complete
    root/step-000000100.replaced    complete; a newer checkpoint of that step was about to follow
    root/.step-000000080.deleted    being deleted, or left by a run that was killed

All functions are for one rank, except `partial`, `read` and `write`. Collective over: none.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
AHEAD = 2**23  # bytes after which the system is asked to begin to write to the disk


def begin(final: Path) -> None:
    """Makes the temporary directory of `final`, and removes those that killed runs left."""
    for leftover in final.parent.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    missing = [path for path in final.parents if not path.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)
    partial(final).mkdir()


def write(path: Path, blocks: Iterable[bytes | memoryview]) -> int:
    """The file holds the blocks one after the other, on disk; returns its bytes.

    Raises:
        OSError: with the file's name.
    """
    try:
        with open(path, "wb") as file:
            begun = 0
            for block in blocks:
                file.write(block)
                if (end := file.tell()) - begun >= AHEAD:
                    # The disk writes what is there while the rest is made; fsync waits for less.
                    os.posix_fadvise(file.fileno(), begun, end - begun, os.POSIX_FADV_DONTNEED)
                    begun = end
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError as error:
        error.filename = str(path)  # the system names it only where it could not be opened
        raise


def read(path: Path) -> io.BufferedReader:
    """The file, open; what is no plain file could lead out of its directory, or never end.

    Raises:
        OSError: it is a link, a pipe, a device, or cannot be opened.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError("it is a link, or no file")
    return open(path, "rb")


def replace(path: Path, content: bytes) -> None:
    """The file holds `content`, on disk; after a kill that, or what it held before."""
    new = path.with_name(f".{path.name}.new")
    write(new, [content])
    os.replace(new, path)
    _sync(path.parent)


def commit(final: Path, manifest: bytes) -> None:
    """Gives the temporary directory, whose other files are written, its manifest and its name."""
    write(partial(final) / MANIFEST, [manifest])
    _sync(partial(final))
    if final.exists():
        _remove(_replaced(final))
        os.replace(final, _replaced(final))
    os.replace(partial(final), final)
    _sync(final.parent)


def abandon(final: Path) -> None:
    """Removes the temporary directory of `final`, if it can be removed."""
    shutil.rmtree(partial(final), ignore_errors=True)


def free(path: Path) -> int:
    """Bytes that are free where `path` is, or will be."""
    return shutil.disk_usage(next(found for found in [path, *path.parents] if found.exists())).free


def prune(final: Path, keep: int) -> None:
    """Deletes what `final` replaced and, of the older ones, all but the last `keep` - 1."""
    found = complete(final.parent)
    older = [path for path in found[: found.index(final)] if path != _replaced(final)]
    for leftover in final.parent.glob(".step-*.deleted"):
        shutil.rmtree(leftover)
    for path in [_replaced(final), *older[: max(0, len(older) - keep + 1)]]:
        _remove(path)


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    found = {}
    for path in root.iterdir() if root.exists() else ():
        match = re.fullmatch(r"step-(\d{9,})(\.replaced)?", path.name)
        if match and (path / MANIFEST).exists():
            found[int(match[1]), match[2] is None] = path
    return [found[key] for key in sorted(found)]


def partial(final: Path) -> Path:
    """The temporary directory in which `final` is made."""
    return final.with_name(f".{final.name}.partial")


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Takes the name away first: what is half deleted must not look complete."""
    doomed = path.with_name(f".{path.name}.deleted")
    for found in (doomed, path):
        if found.exists():
            os.replace(found, doomed)
            shutil.rmtree(doomed)
