"""Damaged checkpoints: refused before HDF5 parses files, and replaced by the checkpoint before."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest
import torch

import mpikfac
from mpikfac import UserError, find_checkpoint, save_checkpoint
from support.forked import start

pytestmark = [pytest.mark.slow, pytest.mark.gate]

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
FLIPS = 1000 if SOAK else 200
FILES = ("manifest.json", "shard-0.h5", "shard-1.h5")


def save_two(comm, root: Path) -> None:
    """Save steps 1 and 2, with a shard of either rank in both."""
    generator = torch.Generator().manual_seed(comm.rank)
    for step in (1, 2):
        items = {
            f"factors/{comm.rank}": torch.rand(10_000, generator=generator),
            "trainer/steps": step,
        }
        save_checkpoint(comm, root, items, step)


@pytest.fixture
def pristine(tmp_path) -> Path:
    root = tmp_path / "pristine"
    processes = start(2, lambda comm: save_two(comm, root))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return root


def flipped(newest: Path) -> Iterator[Path]:
    chance = random.Random(0)
    for _ in range(FLIPS):
        file = newest / chance.choice(FILES)
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        yield file


def truncated(newest: Path) -> Iterator[Path]:
    for name in FILES:
        for size in range(0, (newest / name).stat().st_size, 512):
            os.truncate(newest / name, size)
            yield newest / name


def zeroed(newest: Path) -> Iterator[Path]:
    for name in FILES:
        for offset in range(0, (newest / name).stat().st_size - 4096, 4096):
            with open(newest / name, "r+b") as file:
                file.seek(offset)
                file.write(bytes(4096))
            yield newest / name


def deleted(newest: Path) -> Iterator[Path]:
    for name in FILES[1:]:
        (newest / name).unlink()
        yield newest / name


def swapped(newest: Path) -> Iterator[Path]:
    older = newest.with_name("step-000000001")
    for file, other in [
        (newest / "shard-0.h5", newest / "shard-1.h5"),
        (newest / "shard-0.h5", older / "shard-0.h5"),
        (newest / "shard-1.h5", older / "shard-0.h5"),
    ]:
        shutil.copy(other, file)
        yield file
    shutil.copy(older / "manifest.json", newest / "manifest.json")  # stale
    yield newest


def replaced_by_links(newest: Path) -> Iterator[Path]:
    for name in FILES[1:]:
        (newest / name).rename(newest.parent / name)
        (newest / name).symlink_to(newest.parent / name)
        yield newest / name


@pytest.mark.parametrize(
    "damages", [flipped, truncated, zeroed, deleted, swapped, replaced_by_links]
)
def test_what_is_damaged_is_passed_over(pristine, tmp_path, monkeypatch, caplog, damages) -> None:
    """Oracle: the step before; a line names bad file and used checkpoint; HDF5 parses nothing."""
    root = tmp_path / "checkpoints"
    newest = root / "step-000000002"
    shutil.copytree(pristine, root)
    monkeypatch.setattr(h5py, "File", None)
    trials = 0
    for file in damages(newest):
        found = find_checkpoint(mpikfac.world(), root)
        assert found is not None and found.step == 1
        (record,) = caplog.records
        assert str(file) in record.message and f"continuing from {found.path}" in record.message
        caplog.clear()
        shutil.rmtree(root)
        shutil.copytree(pristine, root)
        trials += 1
    assert trials >= 2
    assert find_checkpoint(mpikfac.world(), root).step == 2


def test_directories_to_skip(pristine, caplog) -> None:
    """Oracle: the remaining checkpoint, without a message; nothing if all are skipped."""
    names = sorted(path.name for path in pristine.iterdir())
    assert find_checkpoint(mpikfac.world(), pristine, skip=names[1:]).path.name == names[0]
    assert find_checkpoint(mpikfac.world(), pristine, skip=names) is None
    assert not caplog.records


def test_a_directory_without_checkpoints(tmp_path) -> None:
    """Oracle: none."""
    assert find_checkpoint(mpikfac.world(), tmp_path) is None
    assert find_checkpoint(mpikfac.world(), tmp_path / "missing") is None


def test_if_all_are_damaged_they_are_listed(pristine) -> None:
    """Oracle: the line names both files, and the damage of both."""
    os.truncate(pristine / "step-000000001" / "shard-0.h5", 100)
    (pristine / "step-000000002" / "shard-1.h5").unlink()
    with pytest.raises(UserError) as refused:
        find_checkpoint(mpikfac.world(), pristine)
    text = str(refused.value)
    assert f"{pristine / 'step-000000001' / 'shard-0.h5'} is damaged: it has 100 bytes" in text
    assert f"{pristine / 'step-000000002' / 'shard-1.h5'} is missing" in text
    assert "\n" not in text
