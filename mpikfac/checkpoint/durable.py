"""Make checkpoint directories; a directory gets its final name once all content is on disk.

    root/.step-000000120.partial    being written, or left by a killed run
    root/step-000000120             complete
    root/step-000000100.replaced    complete; a newer checkpoint of step 100 was about to follow
    root/.step-000000080.deleted    being deleted, or left by a killed run

Call all functions on a single rank, except `partial`, `read` and `write`. Collective over: none.
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
    """Make the temporary directory of `final`, and remove the leftovers of killed runs."""
    for leftover in final.parent.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    missing = [path for path in final.parents if not path.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)
    partial(final).mkdir()


def write(path: Path, blocks: Iterable[bytes | memoryview]) -> int:
    """Write the blocks to the file in order, down to the disk, and return the file's bytes.

    Raises:
        OSError: writing failed; the error has the file's name.
    """
    try:
        with open(path, "wb") as file:
            begun = 0
            for block in blocks:
                file.write(block)
                if (end := file.tell()) - begun >= AHEAD:
                    # The disk writes the finished blocks while the rest is made; fsync waits less.
                    os.posix_fadvise(file.fileno(), begun, end - begun, os.POSIX_FADV_DONTNEED)
                    begun = end
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError as error:
        error.filename = str(path)  # the system names the file only if opening failed
        raise


def read(path: Path) -> io.BufferedReader:
    """Open a regular file: a link could lead out of the directory, a pipe could never end.

    Raises:
        OSError: `path` is a link, a pipe or a device, or cannot be opened.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError("it is a link, or not a regular file")
    return open(path, "rb")


def replace(path: Path, content: bytes) -> None:
    """Replace the file's content on disk; a killed run leaves the new or the old content."""
    new = path.with_name(f".{path.name}.new")
    write(new, [content])
    os.replace(new, path)
    _sync(path.parent)


def commit(final: Path, manifest: bytes) -> None:
    """Write the manifest, and rename the temporary directory to `final`; shards are written."""
    write(partial(final) / MANIFEST, [manifest])
    _sync(partial(final))
    if final.exists():
        _remove(_replaced(final))
        os.replace(final, _replaced(final))
    os.replace(partial(final), final)
    _sync(final.parent)


def abandon(final: Path) -> None:
    """Remove the temporary directory of `final`; ignore errors."""
    shutil.rmtree(partial(final), ignore_errors=True)


def free(path: Path) -> int:
    """Return the free bytes on the file system of `path`; `path` need not exist."""
    return shutil.disk_usage(next(found for found in [path, *path.parents] if found.exists())).free


def prune(final: Path, keep: int) -> None:
    """Delete the checkpoint replaced by `final`, and older checkpoints but the last `keep` - 1."""
    found = complete(final.parent)
    older = [path for path in found[: found.index(final)] if path != _replaced(final)]
    for leftover in final.parent.glob(".step-*.deleted"):
        shutil.rmtree(leftover)
    for path in [_replaced(final), *older[: max(0, len(older) - keep + 1)]]:
        _remove(path)


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first."""
    found = {}
    for path in root.iterdir() if root.exists() else ():
        match = re.fullmatch(r"step-(\d{9,})(\.replaced)?", path.name)
        if match and (path / MANIFEST).exists():
            found[int(match[1]), match[2] is None] = path
    return [found[key] for key in sorted(found)]


def partial(final: Path) -> Path:
    """Return the temporary directory in which `final` is made."""
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
    """Delete a checkpoint; rename first, so that a half deleted directory never looks complete."""
    doomed = path.with_name(f".{path.name}.deleted")
    for found in (doomed, path):
        if found.exists():
            os.replace(found, doomed)
            shutil.rmtree(doomed)
