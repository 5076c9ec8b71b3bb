"""Create checkpoint directories, which get their final name once all content is on disk.

    root/.step-000000120.partial    being written, or left by a killed run
    root/step-000000120             complete; damaged if the manifest is missing
    root/step-000000100.replaced    complete; was about to be replaced by a newer one of step 100
    root/.step-000000080.deleted    being deleted, or left by a killed run

Call all functions on a single rank, except `directory_of`, `partial`, `step_of` and `write`.
Collective over: none.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from mpikfac import files

MANIFEST = "manifest.json"
REPLACED = ".replaced"
AHEAD = 2**23  # bytes after which the system is asked to start writing to disk


def directory_of(path: object) -> Path:
    """Return a user's path, with "~" replaced by the home directory.

    Raises:
        ValueError: `path` is neither a str nor a pathlib.Path.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"the checkpoint path must be a str or a pathlib.Path, not {path!r}")
    return Path(path).expanduser()


def begin(final: Path) -> None:
    """Create the temporary directory of `final`, and remove the leftovers of killed runs."""
    for leftover in final.parent.glob(".step-*.partial"):
        _delete(leftover)
    missing = [path for path in final.parents if not path.exists()]
    for directory in reversed(missing):
        if directory.is_symlink():
            raise FileNotFoundError(
                f"{directory} is a link to {directory.readlink()}, which does not exist; create "
                f"that directory, or remove the link"
            )
        directory.mkdir(exist_ok=True)
        _sync(directory.parent)
    partial(final).mkdir()


def write(path: Path, blocks: Iterable[bytes | memoryview]) -> int:
    """Write the blocks to the file in order, flush it to disk, and return its size in bytes.

    Raises:
        OSError: writing failed; the error contains the file's name.
    """
    try:
        with io.BufferedWriter(files.writing(path)) as file:
            begun = 0
            for block in blocks:
                file.write(block)
                if (end := file.tell()) - begun >= AHEAD:
                    # The disk writes finished blocks while others are produced, so fsync waits
                    # less.
                    os.posix_fadvise(file.fileno(), begun, end - begun, os.POSIX_FADV_DONTNEED)
                    begun = end
            file.flush()
            os.fsync(file.fileno())
            return file.tell()
    except OSError as error:
        error.filename = str(path)  # the system names the file only if opening failed
        raise


def replace(path: Path, content: bytes) -> None:
    """Replace the file's content on disk; a killed run leaves either the new or the old content."""
    temporary = path.with_name(f".{path.name}.new")
    _delete(temporary)
    write(temporary, [content])
    os.replace(temporary, path)
    _sync(path.parent)


def commit(final: Path, manifest: bytes) -> None:
    """Write the manifest, and rename the temporary directory, with all shards, to `final`."""
    write(partial(final) / MANIFEST, [manifest])
    _sync(partial(final))
    if os.path.lexists(final):
        _remove(_replaced(final))
        os.replace(final, _replaced(final))
    os.replace(partial(final), final)
    _sync(final.parent)


def abandon(final: Path) -> None:
    """Remove the temporary directory of `final`; ignore errors."""
    shutil.rmtree(partial(final), ignore_errors=True)


def free(path: Path) -> int:
    """Return the number of free bytes on the file system of `path`; `path` need not exist."""
    return shutil.disk_usage(next(place for place in [path, *path.parents] if place.exists())).free


def prune(final: Path, keep: int, sound: Callable[[Path], bool]) -> None:
    """Delete the checkpoint that `final` replaces, and all before the last `keep` intact ones.

    Links and files named like a checkpoint are ignored.

    Args:
        keep: how many sound checkpoints to keep, including `final`.
        sound: returns whether a checkpoint can be read; damaged checkpoints are not counted.
    """
    for leftover in final.parent.glob(".step-*.deleted"):
        _delete(leftover)
    _remove(_replaced(final))
    checkpoints = [path for path in named(final.parent) if path.is_dir() and not path.is_symlink()]
    older = checkpoints[: checkpoints.index(final)]
    count = 1
    while older and count < keep:
        count += sound(older.pop())
    for path in older:
        _remove(path)


def named(root: Path) -> list[Path]:
    """Return everything under `root` that is named like a checkpoint, damaged or not, oldest first.

    Raises:
        OSError: `root` is not a directory, or cannot be read.
    """
    paths = {}
    for path in root.iterdir() if os.path.lexists(root) else ():
        if (step := step_of(path)) is not None:
            paths[step, not path.name.endswith(REPLACED)] = path
    return [paths[key] for key in sorted(paths)]


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for any other name."""
    match = re.fullmatch(rf"step-(\d{{9,}})({re.escape(REPLACED)})?", path.name, re.ASCII)
    return int(match[1]) if match else None


def partial(final: Path) -> Path:
    """Return the temporary directory in which `final` is written."""
    return final.with_name(f".{final.name}.partial")


def _replaced(final: Path) -> Path:
    return final.with_name(final.name + REPLACED)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a checkpoint; rename it first, so that a partly deleted one never looks complete."""
    doomed = path.with_name(f".{path.name}.deleted")
    _delete(doomed)
    if os.path.lexists(path):
        os.replace(path, doomed)
        _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a directory with its content, a file, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
