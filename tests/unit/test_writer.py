from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

import mpikfac
from mpikfac import CheckpointWriter, UserError
from mpikfac.checkpoint import latest_checkpoint, read_checkpoint

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no GPU"),
    ),
]


@pytest.fixture
def writer(comm, tmp_path) -> CheckpointWriter:
    return CheckpointWriter(comm, tmp_path / "checkpoints")


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_is_what_was_there_at_the_call(writer, device) -> None:
    """Oracle: copies made before; the tensors change as soon as the call returns."""
    shapes = [(1000, 1000), (64, 32, 3, 3), (7,), (), (0, 3)]
    items = {str(shape): torch.rand(shape, device=device) for shape in shapes}
    items["images"] = items["(64, 32, 3, 3)"].contiguous(memory_format=torch.channels_last)
    items["every second"] = torch.rand(100, device=device)[::2]
    items["model/weight"] = torch.nn.Parameter(torch.rand(50, device=device))
    for step in range(100 if SOAK else 10):
        expected = {name: value.detach().cpu().clone() for name, value in items.items()}
        writer.begin(items, step)
        for value in items.values():
            value.data.add_(1)
        found = read_checkpoint(writer.commit())
        assert found.step == step
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_pending_checkpoint_is_not_there_yet(writer, monkeypatch) -> None:
    """Oracle: no name points to the checkpoint until its bytes are synced and `commit` returns."""
    may_sync, fsync = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            may_sync.wait(30)
        fsync(descriptor)

    assert not writer.pending and not writer.written and writer.commit() is None
    monkeypatch.setattr(os, "fsync", slow)
    writer.begin({"x": torch.ones(3)}, 1)
    assert writer.pending and not writer.written
    may_sync.set()
    while not writer.written:
        assert latest_checkpoint(writer.root) is None
    assert writer.pending and latest_checkpoint(writer.root) is None
    path = writer.commit()
    assert not writer.pending and not writer.written
    assert latest_checkpoint(writer.root) == path == writer.root / "step-000000001"


def test_the_next_begin_commits_what_is_pending(writer) -> None:
    """Oracle: the step before, as soon as the call returns."""
    for step in range(1, 4):
        writer.begin({"x": step}, step)
        assert latest_checkpoint(writer.root) == (
            writer.root / f"step-{step - 1:09d}" if step > 1 else None
        )
    assert writer.commit().name == "step-000000003"


def test_older_checkpoints_are_deleted_once_the_new_one_is_there(comm, tmp_path) -> None:
    """Oracle: the newest two; the thread deletes before writing."""
    writer = CheckpointWriter(comm, tmp_path, keep=2)
    for step in range(5):
        writer.begin({"x": step}, step)
    writer.commit()
    writer.begin({"x": 5}, 5)
    while not writer.written:
        pass
    steps = sorted(path.name for path in tmp_path.glob("step-*"))
    assert steps == ["step-000000003", "step-000000004"]


def test_a_failed_write_is_raised_by_commit_or_by_the_next_begin(writer, monkeypatch) -> None:
    """Oracle: the first checkpoint; nothing is left of failed checkpoints; the next save works."""
    good = mpikfac.save_checkpoint(writer.comm, writer.root, {"x": 1}, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for raising in (writer.commit, lambda: writer.begin({"x": 3}, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            writer.begin({"x": torch.ones(9)}, 2)
            while not writer.written:
                pass
        with pytest.raises(UserError, match="step-000000002: .*No space left.* bytes needed"):
            raising()
        assert not writer.pending
        assert os.listdir(writer.root) == [good.name]
    writer.begin({"x": 3}, 3)
    assert read_checkpoint(writer.commit())["x"] == 3


def test_memory_is_used_again(writer) -> None:
    """Oracle: the copies' addresses; a tensor of another shape gets a new address."""
    items = {"x": torch.ones(1000), "y": torch.ones(10)}
    writer.begin(items, 1)
    first = {name: copy.data_ptr() for name, copy in writer._copies.items()}
    writer.begin(items | {"y": torch.ones(20)}, 2)
    assert writer._copies["x"].data_ptr() == first["x"]
    assert writer._copies["y"].shape == (20,)
    writer.begin({"y": torch.ones(20)}, 3)
    assert list(writer._copies) == ["y"]
    writer.commit()
