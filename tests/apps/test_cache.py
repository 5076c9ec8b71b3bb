"""The copy of a packed file on the disk of a node: the same batches, and never a lost run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from blake3 import blake3

import mpikfac
from mpikfac_apps.images import cache, packed
from mpikfac_apps.inspecting import pack
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.training.batches import FileBatches
from support import pictures


@pytest.fixture
def images(tmp_path):
    """Return a packed file."""
    folder, out = pictures.noise(tmp_path / "folder"), tmp_path / "images.h5"
    assert pack.main([str(folder), str(out)]) == 0
    return out


@pytest.fixture
def directory(tmp_path):
    """Return the path of a directory of copies, which is not there yet."""
    return tmp_path / "disk" / "of" / "node"


def cached(images, directory):
    found = packed.listed(str(images), size=14)
    return cache.on_nodes(mpikfac.world(), found, str(directory))


def all_batches(found, workers=0):
    """Return the images of an epoch, and of a test."""
    data = DataOptions(name="packed", size=14, augment=True, workers=workers)
    mine = FileBatches(found, 12, data, seed=0, device=torch.device("cpu"))
    batches = [mine.get(0, index)[0] for index in range(4)]
    batches += [pixels for pixels, _ in mine.test(5)]
    mine.close()
    return torch.cat(batches)


def spoil(path: Path, start: int, count: int) -> None:
    """Change bytes of a file; time and size stay."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(start)
        content = file.read(count)
        file.seek(start)
        file.write(bytes(255 - byte for byte in content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def copy_of(found, directory):
    return directory / f"{found.content.digest}.images"


def bytes_of(images):
    place = packed.listed(str(images)).content.place
    return images.read_bytes()[place.start : place.start + place.size]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_read_from_the_copy(images, directory, workers):
    """Oracle: the packed file; later the bytes of its images are wrong, and only the copy right."""
    plain = packed.listed(str(images), size=14)
    expected = all_batches(plain)
    found = cached(images, directory)
    assert found.train_images.digest == plain.train_images.digest
    assert copy_of(found, directory).read_bytes() == bytes_of(images)
    moved = found.part(None, 9)
    assert moved.test_images.place(8).copy is not None
    spoil(images, plain.content.place.start, plain.content.place.size)
    assert torch.equal(all_batches(found, workers), expected)


def test_the_name_of_a_copy_is_the_checksum_of_the_images(images, directory):
    """Oracle: BLAKE3 of the bytes; a packed file of other images has another name."""
    found = cached(images, directory)
    assert found.content.digest == blake3(bytes_of(images)).hexdigest()
    other, smaller = images.parent / "other.h5", ("--size", "16")
    assert pack.main([str(images.parent / "folder"), str(other), *smaller]) == 0
    cached(other, directory)
    assert len(os.listdir(directory)) == 2


def test_a_restart_takes_the_copy(images, directory, monkeypatch):
    """Oracle: the number of the file, and no writing."""
    found = cached(images, directory)
    number = copy_of(found, directory).stat().st_ino
    monkeypatch.setattr(cache, "write", lambda *_: pytest.fail("written anew"))
    again = cached(images, directory)
    assert again.train_images.copy == found.train_images.copy
    assert copy_of(found, directory).stat().st_ino == number


@pytest.mark.parametrize("damage", ["a byte", "shorter", "longer", "empty"])
def test_a_damaged_copy_is_replaced(images, directory, damage):
    """Oracle: the bytes of the packed file."""
    copy = copy_of(cached(images, directory), directory)
    content = copy.read_bytes()
    if damage == "a byte":
        spoil(copy, len(content) // 2, 1)
    else:
        copy.write_bytes({"shorter": content[:-1], "longer": content + b"x", "empty": b""}[damage])
    assert copy.read_bytes() != content
    assert cached(images, directory).train_images.copy is not None
    assert copy.read_bytes() == content


def test_leftovers_of_a_killed_run_are_removed(images, directory):
    """Oracle: the names in the directory; a file of somebody else stays."""
    directory.mkdir(parents=True)
    for name in (f".{'0' * 64}.images.partial", ".mine.partial"):
        (directory / name).write_bytes(b"half")
    name = copy_of(cached(images, directory), directory).name
    assert sorted(os.listdir(directory)) == sorted([".mine.partial", name])


def test_runs_that_start_at_once_write_one_copy(images, directory, monkeypatch):
    """Oracle: the number of copies that are written, and the bytes that each run finds."""
    content, begin = packed.listed(str(images)).content, threading.Barrier(4)
    wrote, found, write = [], [], cache.write

    def counted(*given):
        wrote.append(given)
        write(*given)

    def run():
        begin.wait(10)
        found.append(cache.sound_copy(content, directory).read_bytes())

    monkeypatch.setattr(cache, "write", counted)
    runs = [threading.Thread(target=run) for _ in range(4)]
    for one in runs:
        one.start()
    for one in runs:
        one.join(60)
    assert len(wrote) == 1 and found == [bytes_of(images)] * 4


@contextmanager
def too_small(images, directory):
    usage = shutil.disk_usage("/")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        yield


@contextmanager
def filling(images, directory):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def a_file(images, directory):
    directory.parent.mkdir(parents=True)
    directory.write_text("mine")
    yield
    assert directory.read_text() == "mine"


@contextmanager
def a_link(images, directory):
    directory.mkdir(parents=True)
    target = directory / "target"
    target.write_bytes(bytes_of(images))
    copy_of(packed.listed(str(images)), directory).symlink_to(target)
    yield
    assert target.read_bytes() == bytes_of(images)
    copy_of(packed.listed(str(images)), directory).unlink()
    target.unlink()


@contextmanager
def without_locks(images, directory):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        yield


@contextmanager
def older(images, directory):
    rewrite(images, digest=None)
    yield


@contextmanager
def another_checksum(images, directory):
    rewrite(images, digest="0" * 64)
    yield


@contextmanager
def forged(images, directory):
    rewrite(images, digest="../" * 21 + "x")
    yield


def rewrite(images, digest):
    """Write a packed file anew, with another checksum or with none."""
    items, _, _ = mpikfac.checkpoint.read_around(images, packed.LARGE)
    content = torch.frombuffer(bytearray(bytes_of(images)), dtype=torch.uint8)
    items |= {packed.LARGE: content, "digest": digest}
    kept = {name: value for name, value in items.items() if value is not None}
    mpikfac.checkpoint.write_shard(images, kept)


TROUBLES = {
    too_small: r"the copy takes 0\.\d MB, and 0\.0 MB are free",
    filling: "File too large",
    a_file: "File exists",
    a_link: "it is a link, not a regular file",
    without_locks: "No locks available",
    older: "the packed file has no checksum; create it again with mpikfac pack",
    another_checksum: "the packed file is damaged: its images have a different checksum",
    forged: "the packed file has no checksum; create it again with mpikfac pack",
}


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_a_node_without_a_copy_reads_the_packed_file(images, directory, caplog, trouble):
    """Oracle: the batches without a cache, one warning, and nothing left in the directory."""
    expected = all_batches(packed.listed(str(images), size=14))
    with trouble(images, directory):
        found = cached(images, directory)
    assert found.train_images.copy is None
    assert torch.equal(all_batches(found), expected)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    about = f"data.cache={directory}: 1 of 1 nodes have no copy and read {images}; "
    assert line.startswith(about) and re.search(f": {TROUBLES[trouble]}$", line)
    assert not directory.is_dir() or not os.listdir(directory)
