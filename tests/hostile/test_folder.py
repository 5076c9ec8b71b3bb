"""A folder of checkpoints with bad checkpoints, links, files and pipes under any name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mpikfac
from mpikfac import UserError, find_checkpoint, save_checkpoint
from mpikfac.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    note_end,
    note_start,
    read_checkpoint,
)
from support.forgery import manifest_of, seal


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


def save(root: Path, step: int, keep: int = 2) -> Path:
    items = {"x": torch.full((4,), float(step)), "trainer/steps": step}
    return save_checkpoint(mpikfac.world(), root, items, step, keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def dangling(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.parent / "nowhere")


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


SPOILED: dict[str, Callable[[Path], object]] = {
    "manifest deleted": lambda path: (path / "manifest.json").unlink(),
    "manifest renamed": lambda path: (path / "manifest.json").rename(path / "manifest.old"),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
    "dangling link": dangling,
    "file": a_file,
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_checkpoint_without_manifest_is_named(root, caplog, spoiled) -> None:
    """Oracle: the step before is taken, in one line; without a step before, one line refuses."""
    save(root, 1)
    newest = save(root, 2)
    SPOILED[spoiled](newest)
    assert find_checkpoint(mpikfac.world(), root).step == 1
    (record,) = caplog.records
    assert str(newest) in record.getMessage() and "continuing from" in record.getMessage()
    caplog.clear()
    assert latest_checkpoint(root).name == "step-000000001"
    (record,) = caplog.records
    assert record.getMessage() == f"{newest} is skipped: manifest.json is missing"
    SPOILED[spoiled](root / "step-000000001")
    with pytest.raises(UserError, match=f"no checkpoint in {root} can be read: .*{newest}"):
        find_checkpoint(mpikfac.world(), root)


@pytest.mark.parametrize("name", ["step-000000003", "step-000000001.replaced"])
def test_a_renamed_checkpoint_is_refused(root, name) -> None:
    """Oracle: the manifest's step; a name that is no step's may be given."""
    path = save(root, 2).rename(root / name)
    with pytest.raises(UserError, match=f"{path} has the manifest of step 2"):
        read_checkpoint(path)
    with pytest.raises(UserError, match="has the manifest of step 2"):
        find_checkpoint(mpikfac.world(), root)
    assert read_checkpoint(path.rename(root / "best"))["trainer/steps"] == 2


def test_damaged_checkpoints_are_not_among_those_kept(root, caplog) -> None:
    """Oracle: the good checkpoint stays until as many newer good checkpoints exist."""
    save(root, 1)
    for step, spoil in ((2, flip), (3, SPOILED["manifest deleted"]), (4, SPOILED["empty"])):
        spoil(save(root, step))
        assert "step-000000001" in names(root)
    save(root, 5)
    assert names(root) == [f"step-00000000{step}" for step in (1, 2, 3, 4, 5)]
    save(root, 6)
    assert names(root) == ["step-000000005", "step-000000006"]
    texts = [record.getMessage() for record in caplog.records]
    assert any("step-000000002/shard-0.h5 is damaged" in text for text in texts)


def flip(path: Path) -> None:
    content = bytearray((path / "shard-0.h5").read_bytes())
    content[-1] ^= 1
    (path / "shard-0.h5").write_bytes(content)


def test_leftovers_of_any_kind_are_removed(root, tmp_path) -> None:
    """Oracle: the folder after saving; the targets of links stay."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("")
    save(root, 1)
    for kind in ("partial", "deleted"):
        (root / f".step-000000007.{kind}").symlink_to(outside)
        (root / f".step-000000008.{kind}").write_text("")
        os.mkfifo(root / f".step-000000009.{kind}")
        (root / f".step-000000002.{kind}").symlink_to(root / "nowhere")
    save(root, 2)
    assert names(root) == ["step-000000001", "step-000000002"]
    assert names(outside) == ["mine"]


def test_links_to_checkpoints_are_read_and_never_deleted(root, tmp_path) -> None:
    """Oracle: the values behind the link; the link and its target stay after pruning."""
    moved = save(root, 1).rename(tmp_path / "step-000000001")
    (root / "step-000000001").symlink_to(moved)
    assert find_checkpoint(mpikfac.world(), root)["x"].tolist() == [1.0] * 4
    for step in (2, 3, 4):
        save(root, step, keep=1)
    assert names(root) == ["step-000000001", "step-000000004"]
    assert read_checkpoint(moved)["x"].tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_name_in_use_is_taken_over(root, tmp_path, kind) -> None:
    """Oracle: the checkpoint of the name; nothing is left, and the link's target stays."""
    root.mkdir()
    (tmp_path / "outside").mkdir()
    taken = root / "step-000000001"
    taken.write_text("") if kind == "file" else taken.symlink_to(tmp_path / "outside")
    assert read_checkpoint(save(root, 1)).step == 1
    assert names(root) == ["step-000000001"] and not taken.is_symlink()
    assert names(tmp_path / "outside") == []


def test_names_of_other_things_are_passed_over(root) -> None:
    """Oracle: the checkpoint; digits of other scripts are no step."""
    path = save(root, 1)
    for name in ("step-9", "step-00000000x", "step-٠٠٠٠٠٠٠٠٩", "step-000000009.copy"):
        (root / name).mkdir()
    assert latest_checkpoint(root) == find_checkpoint(mpikfac.world(), root).path == path


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "deep", "huge", "list", "large"])
def test_a_record_of_starts_that_is_none(root, tmp_path, caplog, kind) -> None:
    """Oracle: no count, one warning, and no write outside; the next start counts again."""
    path, record = save(root, 1), root / "starts.json"
    (tmp_path / "outside").write_text("mine")
    if kind == "link":
        record.symlink_to(tmp_path / "outside")
        (root / ".starts.json.new").symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(record)
        os.mkfifo(root / ".starts.json.new")
    elif kind == "directory":
        (record / "inside").mkdir(parents=True)
        (root / ".starts.json.new").mkdir()
    elif kind == "huge":
        with open(record, "wb") as file:
            file.truncate(2**40)
    else:
        texts = {"deep": "[" * 10**5, "list": "[1, [2]]", "large": '[{"step": 1e999}]'}
        record.write_text(texts[kind])
    checkpoint = find_checkpoint(mpikfac.world(), root)
    assert checkpoint.path == path and not caplog.records
    note_start(checkpoint)
    assert f"{record} cannot be read" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1 + (kind == "directory")
    caplog.clear()
    note_end(root)
    assert len(caplog.records) == (kind == "directory")
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_shard_larger_than_memory_is_refused_at_once(root) -> None:
    """Oracle: the bytes in the message, for a file of holes with its size in the manifest."""
    path = save(root, 1)
    manifest = manifest_of(path)
    manifest["shards"]["shard-0.h5"]["size"] = 2**43
    seal(path, manifest)
    os.truncate(path / "shard-0.h5", 2**43)
    for read in (find_checkpoint, lambda comm, _: load_checkpoint(comm, path)["x"]):
        with pytest.raises(UserError, match="has 8,796,093,022,208 bytes; this machine's memory"):
            read(mpikfac.world(), root)


@pytest.mark.parametrize("step", [2**53 + 1, 2**62, 10**400], ids=["2^53+1", "2^62", "10^400"])
def test_a_step_that_no_run_reaches_is_refused(root, step) -> None:
    """Oracle: a line with the manifest's name; the digest is right."""
    path = save(root, 1)
    seal(path, manifest_of(path) | {"step": step})
    with pytest.raises(UserError, match="manifest.json has step .*, more than any run takes"):
        read_checkpoint(path)
