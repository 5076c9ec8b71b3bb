"""Keep a copy of the images of a packed file on the disk of each node.

    DIR/DIGEST.images            the bytes of all images, named after their BLAKE3 hash
    DIR/.DIGEST.images.partial   a copy that is being written, or that a killed run left

A run locks the directory while it checks or writes a copy. Runs that start at the same time
therefore write only one copy, and the system releases the lock of a killed run.
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

import mpikfac
from mpikfac import files
from mpikfac_apps.images.listing import Content, ImagePlace, Listing

PIECE = 2**22  # bytes that are read, hashed and written at a time

log = logging.getLogger("mpikfac.train")


class Outcome(NamedTuple):
    """The result of looking for, or writing, a copy of the images on a node.

    Attributes:
        copy: the file with the copy; empty if the node has none.
        trouble: why the node has no copy.
    """

    copy: str = ""
    trouble: str = ""


def on_nodes(comm: mpikfac.comm.Comm, listing: Listing, directory: str) -> Listing:
    """Return the list of images, with their bytes in a copy on the disk of this rank's node.

    One rank of each node checks or writes the copy, and the other ranks wait. If a node has no
    copy, its ranks read the packed file, and a log line gives the reason.

    Collective over: comm.
    """
    content = listing.content
    assert content is not None, "the images are in a single file"
    if comm.rank == 0:
        size = content.place.size or 0
        log.info("data.cache=%s: each node keeps a copy of %.1f MB", directory, size / 1e6)
    first = mpikfac.comm.lowest_in_node(comm)
    outcomes = comm.allgather(attempted(content, directory) if first == comm.rank else None)
    if comm.rank == 0:
        _warn_of_troubles(
            [outcome for outcome in outcomes if outcome is not None], directory, content.place.path
        )
    copy = outcomes[first].copy
    if not os.path.isfile(copy):  # ranks can see different directories under the same name
        return listing
    parts = (listing.train_images, listing.test_images)
    trained, tested = (replace(part, copy=(copy, content.place.start)) for part in parts)
    return replace(listing, train_images=trained, test_images=tested)


def attempted(content: Content, directory: str) -> Outcome:
    """Return the file with a copy of the images, or why the node has no copy."""
    try:
        return Outcome(copy=str(sound_copy(content, Path(directory).absolute())))
    except OSError as error:
        return Outcome(trouble=f"{platform.node()}: {files.why(error)}")
    except ValueError as error:
        return Outcome(trouble=f"{platform.node()}: {error}")


def _warn_of_troubles(outcomes: list[Outcome], directory: str, path: str) -> None:
    """Warn about nodes without a copy, in one line."""
    troubles = [outcome.trouble for outcome in outcomes if outcome.trouble]
    if troubles:
        log.warning(
            "data.cache=%s: %d of %d nodes have no copy and read %s; %s",
            *(directory, len(troubles), len(outcomes), path, files.printable(troubles[0])),
        )


def sound_copy(content: Content, directory: Path) -> Path:
    """Return the file with a copy of the images; write it unless there is an intact copy.

    Raises:
        OSError: the copy cannot be written; the message states the reason.
        ValueError: the packed file has no checksum, or one that does not match its images.
    """
    if not is_digest(content.digest):
        raise ValueError("the packed file has no checksum; create it again with mpikfac pack")
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / f"{content.digest}.images"
    with locked(directory):
        for leftover in directory.glob(".*.images.partial"):
            leftover.unlink()
        if not sound(copy, content):
            write(copy, content)
    return copy


def is_digest(text: str) -> bool:
    """Return whether a string is a BLAKE3 hash, which cannot name a file in another directory."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory; wait for any other run that has locked it.

    Raises:
        OSError: the directory cannot be locked.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # so that the names of the files are on the disk
    finally:
        os.close(descriptor)


def sound(copy: Path, content: Content) -> bool:
    """Return whether a file is an intact copy of the images; the whole file is read."""
    if not os.path.lexists(copy) or os.path.getsize(copy) != content.place.size:
        return False
    digest = blake3()
    for piece in pieces(ImagePlace(str(copy), 0, content.place.size), links=False):
        digest.update(piece)
    return digest.hexdigest() == content.digest


def write(copy: Path, content: Content) -> None:
    """Write a copy of the images, replacing a damaged one; if writing fails, there is no copy.

    Raises:
        OSError: the disk is too full, or a file cannot be read or written.
        ValueError: the images do not match the checksum of the packed file.
    """
    partial, size, digest = copy.with_name(f".{copy.name}.partial"), content.place.size, blake3()
    assert size is not None, "a part of a file has a size"
    copy.unlink(missing_ok=True)
    if size > (free := shutil.disk_usage(copy.parent).free):
        sizes = f"the copy takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, sizes)
    try:
        with io.BufferedWriter(files.writing(partial, "new")) as file:
            for piece in pieces(content.place, links=True):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != content.digest:
            raise ValueError("the packed file is damaged: its images have a different checksum")
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)


def pieces(place: ImagePlace, links: bool) -> Iterator[bytes]:
    """Yield the bytes of a part of a file, piece by piece.

    Raises:
        OSError: the file cannot be read, or ends before the part does.
    """
    assert place.size is not None, "a part of a file has a size"
    with files.reading(place.path, links=links) as file:
        file.seek(place.start)
        left = place.size
        while left:
            if not (piece := file.read(min(PIECE, left))):
                raise OSError("the file ends before the last image does")
            left -= len(piece)
            yield piece
