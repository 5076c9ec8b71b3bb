from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import mpikfac
from mpikfac import (
    RanksDifferError,
    UserError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from mpikfac.checkpoint import latest_checkpoint
from mpikfac.checkpoint.checkpoint import _assign
from mpikfac.checkpoint.manifest import _digest

ITEMS = {
    "model/conv1.weight": torch.linspace(-1, 1, 24).reshape(2, 3, 4),
    "factors/conv1.A": torch.linspace(0, 1e300, 7, dtype=torch.float64),
    "bases/conv1.A.vectors": torch.tensor([[1.5, -0.0], [float("nan"), float("inf")]]).bfloat16(),
    "half": torch.tensor([65504.0, 6e-8]).half(),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "every second": torch.arange(6.0)[::2],
    "counts": torch.tensor([-(2**63), 2**63 - 1]),
    "mask": torch.tensor([True, False, True]),
    "ports": torch.tensor([0, 2**16 - 1], dtype=torch.uint16),
    "counters": torch.tensor([2**32 - 1], dtype=torch.uint32),
    "masks": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "waves": torch.tensor([1 - 2j, complex("nan+infj")]),
    "transposed waves": torch.arange(6.0).double().reshape(2, 3).T * 1j,
    "half waves": torch.tensor([1 - 2j]).to(torch.complex32),
    "eight bits": torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn),
    "eight other bits": torch.tensor([1.5, float("nan")]).to(torch.float8_e5m2),
    "random": torch.arange(256, dtype=torch.uint8),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "empty": torch.empty(0, 5),
    "nothing": torch.empty(0, dtype=torch.bool),
    "trainer/steps": 120,
    "optimizer/groups/0/lr": 0.1,
    "negative zero": -0.0,
    "largest": 2**63 - 1,
    "text": "Größe\n\u2603",
    "text/empty": "",
    "text/zeros": "a\0b\0\0",
    "a/../b/%2F": 1,
    "..": 2,
}


@pytest.fixture
def comm():
    """Return a communicator of a single rank."""
    return mpikfac.world()


def bits(value):
    """Return a value's type; for a tensor its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, bytes(flat.tolist())
    return type(value), repr(value)


def check_items(checkpoint, items):
    assert sorted(checkpoint.keys()) == sorted(items)
    for name, value in items.items():
        assert bits(checkpoint[name]) == bits(value), name


def seal(path: Path, manifest: dict) -> None:
    manifest.pop("digest", None)
    path.write_text(json.dumps(manifest | {"digest": _digest(manifest)}))


def refusal(comm, path, name="x") -> str:
    """Return the single line that refuses the checkpoint, at opening or at reading an item."""
    with pytest.raises(UserError) as refused:
        load_checkpoint(comm, path)[name]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip_of_all_kinds_of_items(comm, tmp_path) -> None:
    """Oracle: the saved bits; signs of zero, NaN and strange names included."""
    path = save_checkpoint(comm, tmp_path / "made" / "here", ITEMS, 120)
    assert path.name == "step-000000120"
    checkpoint = load_checkpoint(comm, path)
    check_items(checkpoint, ITEMS)
    assert checkpoint.step == 120
    assert "mask" in checkpoint and "unknown" not in checkpoint
    assert checkpoint.get("unknown") is None
    assert checkpoint.get("trainer/steps") == 120


def test_what_was_loaded_belongs_to_the_caller(comm, tmp_path) -> None:
    """Oracle: the saved value, read again after the first copy was overwritten."""
    path = save_checkpoint(comm, tmp_path, {"x": torch.ones(3)}, 0)
    checkpoint = load_checkpoint(comm, path)
    checkpoint["x"].zero_()
    assert checkpoint["x"].tolist() == [1, 1, 1]


def test_parameters_and_numpy_floats_are_stored_as_what_they_hold(comm, tmp_path) -> None:
    """Oracle: the plain tensor and number."""
    items = {"weight": torch.nn.Parameter(torch.ones(2)), "lr": np.float64(0.25), "flag": True}
    checkpoint = load_checkpoint(comm, save_checkpoint(comm, tmp_path, items, 0))
    check_items(checkpoint, {"weight": torch.ones(2), "lr": 0.25, "flag": 1})
    assert not checkpoint["weight"].requires_grad


def test_no_items(comm, tmp_path) -> None:
    """Oracle: an empty mapping; no shard is written."""
    path = save_checkpoint(comm, tmp_path, {}, 0)
    assert names(path) == ["manifest.json"]
    assert len(load_checkpoint(comm, path)) == 0


def test_the_same_state_gives_the_same_files(comm, tmp_path) -> None:
    """Oracle: the bytes of a second checkpoint of the same items, given in another order."""
    first = save_checkpoint(comm, tmp_path / "a", ITEMS, 7)
    second = save_checkpoint(comm, tmp_path / "b", dict(reversed(ITEMS.items())), 7)
    assert names(first) == names(second)
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"x": None}, "item 'x' is a NoneType"),
        ({"x": [1, 2]}, "item 'x' is a list"),
        ({"x": torch.empty(2, dtype=torch.bits8)}, "item 'x' has dtype bits8"),
        ({"x": 2**63}, "more than 64 bits"),
        ({".": 1}, "cannot name a dataset"),
        ({1: 1}, "item name 1 cannot name a dataset"),
        ({"x": torch.eye(2).to_sparse()}, "item 'x' is torch.sparse_coo on cpu; use a dense"),
        ({"x": torch.zeros(2, device="meta")}, "item 'x' is torch.strided on meta; use a dense"),
    ],
)
def test_what_cannot_be_stored_is_named(comm, tmp_path, item, text) -> None:
    """Oracle: the message names the item; nothing is written."""
    with pytest.raises(UserError, match=text):
        save_checkpoint(comm, tmp_path, item, 0)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (0, 0), (1.5, 2), ("1", 2)])
def test_bad_step_or_keep(comm, tmp_path, step, keep) -> None:
    """Oracle: the message shows both values."""
    with pytest.raises(ValueError, match=f"step={step}.*keep={keep}"):
        save_checkpoint(comm, tmp_path, {}, step, keep)


def test_a_step_may_be_a_number_of_numpy(comm, tmp_path) -> None:
    """Oracle: the same step as a number of Python."""
    assert save_checkpoint(comm, tmp_path, {}, np.int64(7)).name == "step-000000007"
    assert find_checkpoint(comm, tmp_path).step == 7


def test_latest_ignores_what_is_not_complete(comm, tmp_path) -> None:
    """Oracle: the only directory with both a final name and a manifest."""
    assert latest_checkpoint(tmp_path / "missing") is None
    assert latest_checkpoint(tmp_path) is None
    good = save_checkpoint(comm, tmp_path, {"x": 1}, 9)
    shutil.copytree(good, tmp_path / ".step-000000010.partial")
    (tmp_path / "step-000000011").mkdir()
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-000000013").touch()
    (tmp_path / "notes.txt").touch()
    assert latest_checkpoint(tmp_path) == good


RENAMED = ["step-000000048 (copy)", "STEP-000000048", "step-48", "48", "step-000000048.old"]


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.parametrize("find", [find_checkpoint, lambda _, root: latest_checkpoint(root)])
def test_a_later_checkpoint_of_another_name_is_told(comm, tmp_path, caplog, find, name) -> None:
    """Oracle: the older step, and one line with the later step; an earlier copy needs no line."""
    save_checkpoint(comm, tmp_path, {"a": 1}, 24)
    shutil.copytree(tmp_path / "step-000000024", tmp_path / "best of 24")
    save_checkpoint(comm, tmp_path, {"a": 2}, 48).rename(tmp_path / name)
    find(comm, tmp_path)
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / name} holds step 48, and is skipped; rename it to")
    shutil.rmtree(tmp_path / "step-000000024")
    caplog.clear()
    assert find(comm, tmp_path) is None
    assert len(caplog.messages) == 2


def test_latest_compares_steps_as_numbers(comm, tmp_path) -> None:
    """Oracle: 2,000,000,000 is more than 999,999,999, in any order of the names."""
    save_checkpoint(comm, tmp_path, {"x": 1}, 999_999_999)
    latest = save_checkpoint(comm, tmp_path, {"x": 1}, 2_000_000_000)
    assert latest_checkpoint(tmp_path) == latest


def test_the_newest_are_kept(comm, tmp_path) -> None:
    """Oracle: the last `keep` steps."""
    for step in range(5):
        save_checkpoint(comm, tmp_path, {"x": step}, step)
        assert names(tmp_path) == [f"step-{kept:09d}" for kept in range(max(0, step - 1), step + 1)]
    save_checkpoint(comm, tmp_path, {"x": 5}, 5, keep=1)
    assert names(tmp_path) == ["step-000000005"]


def test_a_run_that_went_back_deletes_no_later_checkpoint_and_not_its_own(comm, tmp_path) -> None:
    """Oracle: steps 100 and 120 from before, and the new 50; only 40 is beyond `keep` before 50."""
    for step in (30, 40, 100, 120):
        save_checkpoint(comm, tmp_path, {"x": step}, step, keep=9)
    save_checkpoint(comm, tmp_path, {"x": -50}, 50, keep=1)
    assert [int(name[5:]) for name in names(tmp_path)] == [50, 100, 120]


def test_a_checkpoint_of_the_same_step_is_replaced(comm, tmp_path) -> None:
    """Oracle: the value saved last; the older step is still kept."""
    save_checkpoint(comm, tmp_path, {"x": 1}, 3)
    save_checkpoint(comm, tmp_path, {"x": 2}, 4)
    path = save_checkpoint(comm, tmp_path, {"x": 3}, 4)
    assert load_checkpoint(comm, path)["x"] == 3
    assert names(tmp_path) == ["step-000000003", "step-000000004"]


def test_leftovers_of_a_killed_run_are_removed(comm, tmp_path) -> None:
    """Oracle: the new checkpoint alone; the new checkpoint must hold no stale shard."""
    for leftover in (".step-000000004.partial", ".step-000000001.deleted"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "shard-7.h5").write_bytes(b"half")
    path = save_checkpoint(comm, tmp_path, {"x": 1}, 4)
    assert names(tmp_path) == ["step-000000004"]
    assert names(path) == ["manifest.json", "shard-0.h5"]


class FileCalls:
    """Count fsync, replace and rmtree, note the calls in order, and raise at a chosen call."""

    def __init__(self, monkeypatch, error: BaseException | None = None, at: int = -1) -> None:
        self.log: list[str] = []
        fsync, replace, rmtree = os.fsync, os.replace, shutil.rmtree

        def note(text: str) -> None:
            self.log.append(text)
            if error is not None and len(self.log) - 1 == at:
                raise error

        def noted_fsync(descriptor: int) -> None:
            note(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
            fsync(descriptor)

        def noted_replace(old: Path, new: Path) -> None:
            note(f"rename {old.name} {new.name}")
            replace(old, new)

        def noted_rmtree(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                note(f"delete {path.name}")
            rmtree(path, ignore_errors)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "replace", noted_replace)
        monkeypatch.setattr(shutil, "rmtree", noted_rmtree)


def test_order_of_operations(comm, tmp_path, monkeypatch) -> None:
    """Oracle: everything is on disk before the name, the name before anything is deleted."""
    save_checkpoint(comm, tmp_path, {"x": 1}, 1)
    calls = FileCalls(monkeypatch)
    save_checkpoint(comm, tmp_path, {"x": 2}, 2, keep=1)
    assert calls.log == [
        "fsync shard-0.h5",
        "fsync manifest.json",
        "fsync .step-000000002.partial",
        "rename .step-000000002.partial step-000000002",
        f"fsync {tmp_path.name}",
        "rename step-000000001 .step-000000001.deleted",
        "delete .step-000000001.deleted",
    ]


# every call of a save on top of steps 1 and 2: of step 2 once more, and of step 3
COMMITTING = [(2, at) for at in range(6)] + [(3, at) for at in range(5)]
DELETING = [(2, 6), (2, 7), (3, 5), (3, 6)]


@pytest.mark.parametrize(("step", "at"), COMMITTING)
def test_a_full_disk_at_any_call_costs_no_checkpoint(comm, tmp_path, monkeypatch, step, at) -> None:
    """Oracle: the values saved before, until the new name exists; then the new values."""
    for old in (1, 2):
        save_checkpoint(comm, tmp_path, {"x": old}, old)
    with monkeypatch.context() as patch:
        calls = FileCalls(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), at)
        with pytest.raises(UserError, match=f"step-00000000{step}.*No space left on device"):
            save_checkpoint(comm, tmp_path, {"x": 10}, step)
    committed = f"fsync {tmp_path.name}" in calls.log
    assert load_checkpoint(comm, latest_checkpoint(tmp_path))["x"] == (10 if committed else 2)
    if not committed:
        assert load_checkpoint(comm, tmp_path / "step-000000001")["x"] == 1
        assert not list(tmp_path.glob(".*"))
    save_checkpoint(comm, tmp_path, {"x": 11}, step)
    assert names(tmp_path) == [f"step-00000000{kept}" for kept in (step - 1, step)]


@pytest.mark.parametrize(("step", "at"), DELETING)
def test_what_cannot_be_deleted_is_a_warning(comm, tmp_path, monkeypatch, caplog, step, at) -> None:
    """Oracle: the new value; the line names the checkpoint; the next save deletes the leftovers."""
    for old in (1, 2):
        save_checkpoint(comm, tmp_path, {"x": old}, old)
    with monkeypatch.context() as patch:
        FileCalls(patch, OSError(errno.EIO, os.strerror(errno.EIO)), at)
        path = save_checkpoint(comm, tmp_path, {"x": 10}, step)
    assert f"older than {path} are not deleted: [Errno 5]" in caplog.text
    assert load_checkpoint(comm, latest_checkpoint(tmp_path))["x"] == 10
    save_checkpoint(comm, tmp_path, {"x": 11}, step)
    assert names(tmp_path) == [f"step-00000000{kept}" for kept in (step - 1, step)]


@pytest.mark.parametrize(("step", "at"), COMMITTING + DELETING)
def test_a_kill_at_any_call_leaves_a_checkpoint(comm, tmp_path, monkeypatch, step, at) -> None:
    """Oracle: the values saved before, or the new values; the next save cleans up."""
    for old in (1, 2):
        save_checkpoint(comm, tmp_path, {"x": old}, old)
    with monkeypatch.context() as patch:
        calls = FileCalls(patch, KeyboardInterrupt(), at)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(comm, tmp_path, {"x": 10}, step)
    committed = f"fsync {tmp_path.name}" in calls.log
    assert load_checkpoint(comm, latest_checkpoint(tmp_path))["x"] == (10 if committed else 2)
    save_checkpoint(comm, tmp_path, {"x": 11}, step)
    assert load_checkpoint(comm, latest_checkpoint(tmp_path))["x"] == 11
    assert names(tmp_path) == [f"step-00000000{kept}" for kept in (step - 1, step)]


def test_a_file_size_limit_of_the_system_is_one_clear_line(comm, tmp_path) -> None:
    """Oracle: the kernel's own refusal of a write, and the older checkpoint."""
    save_checkpoint(comm, tmp_path, {"x": 1}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"step-000000002: .*File too large"):
            save_checkpoint(comm, tmp_path, {"x": torch.zeros(100_000)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000000001"]
    assert load_checkpoint(comm, latest_checkpoint(tmp_path))["x"] == 1


def test_a_missing_item_is_named(comm, tmp_path) -> None:
    """Oracle: the message holds the item and the checkpoint."""
    path = save_checkpoint(comm, tmp_path, {"x": 1}, 1)
    message = refusal(comm, path, "factors/conv1.A")
    assert "'factors/conv1.A'" in message and str(path) in message


def test_damaged_shards_are_refused_by_name(comm, tmp_path, monkeypatch) -> None:
    """Oracle: the message names the file; h5py never sees the bytes."""
    path = save_checkpoint(comm, tmp_path, {"x": torch.arange(300.0)}, 1)
    shard = path / "shard-0.h5"
    good = shard.read_bytes()
    monkeypatch.setattr(h5py, "File", None)
    damaged = [good[:-1], good[: len(good) // 2], b"", good + b"\0"]
    for position in range(0, len(good), 97):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        shard.write_bytes(content)
        message = refusal(comm, path)
        assert f"{shard} is damaged" in message
        whole = len(content) == len(good)
        assert whole or f"{len(content)} bytes, but {len(good)} were written" in message
    shard.unlink()
    assert f"{shard} is missing" in refusal(comm, path)


def test_a_stale_shard_is_passed_over(comm, tmp_path) -> None:
    """Oracle: the step before, whose shard lies in the place of the newest step's shard."""
    older, newest = (
        save_checkpoint(comm, tmp_path, {"x": torch.full((300,), float(step))}, step) / "shard-0.h5"
        for step in (1, 2)
    )
    assert newest.stat().st_size == older.stat().st_size
    shutil.copy(older, newest)
    assert find_checkpoint(comm, tmp_path).step == 1


def test_any_flipped_bit_of_a_manifest_is_refused(comm, tmp_path) -> None:
    """Oracle: the message names the manifest, for every flipped bit."""
    path = save_checkpoint(comm, tmp_path, {"x": torch.arange(3.0)}, 1)
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        manifest.write_bytes(flipped)
        assert str(manifest) in refusal(comm, path)
    manifest.write_bytes(good[:-10])
    assert f"{manifest} is damaged" in refusal(comm, path)
    manifest.unlink()
    assert f"{manifest} is missing" in refusal(comm, path)


def test_other_versions_and_formats_are_refused(comm, tmp_path) -> None:
    """Oracle: the message names the found version and the readable version."""
    path = save_checkpoint(comm, tmp_path, {"x": 1}, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    seal(path / "manifest.json", manifest | {"version": 4})
    assert "checkpoint 4; this program reads mpikfac checkpoint 3" in refusal(comm, path)
    for other in ({"format": "other"}, {}, [], 3, None):
        (path / "manifest.json").write_text(json.dumps(other))
        assert "manifest.json" in refusal(comm, path)


def held(**sizes: int) -> dict:
    return {
        name: {"dtype": "uint8", "shape": [size], "bytes": size} for name, size in sizes.items()
    }


def test_who_writes_what() -> None:
    """Oracle: by hand.

    Items of a single rank are the rank's load; the rest goes to the least loaded.
    """
    assert _assign([held(a=5), held(a=5), held(a=5)]) == [["a"], [], []]
    assert _assign([held(own=9, a=5, b=4), held(a=5, b=4)]) == [["own"], ["a", "b"]]
    assert _assign([held(a=1, b=1, c=1, d=1)] * 2) == [["a", "c"], ["b", "d"]]
    assert _assign([{}, held(a=1), {}]) == [[], ["a"], []]


def test_holders_that_differ_are_named() -> None:
    """Oracle: the message holds the item and both ranks."""
    with pytest.raises(
        RanksDifferError, match=r"item 'a' is .*\[5\].* on rank 1 but .*\[6\].* on rank 2"
    ):
        _assign([held(b=1), held(a=5), held(a=6)])


@pytest.mark.parametrize("where", ["write_shard", "_to_host"])
@pytest.mark.parametrize(
    "error", [MemoryError("room"), KeyError("name"), RuntimeError("HDF5"), TypeError("no type")]
)
def test_a_failed_write_in_the_background_leaves_the_next_one(
    comm, tmp_path, monkeypatch, error, where
):
    """Oracle: the error of all ranks, and the checkpoint that is written next."""

    def failing(*_):
        raise error

    writer = mpikfac.CheckpointWriter(comm, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(mpikfac.checkpoint.checkpoint, where, failing)
        writer.begin({"a": torch.ones(3)}, 3)
        with pytest.raises(mpikfac.UserError, match=f"{type(error).__name__}: "):
            writer.commit()
    assert not list(tmp_path.glob("*step-*"))
    writer.begin({"a": torch.ones(3)}, 4)
    assert writer.commit() == tmp_path / "step-000000004"
    writer.close()


@pytest.mark.parametrize(
    "error", [MemoryError("room"), KeyError("name"), RuntimeError("HDF5"), TypeError("no type")]
)
def test_a_write_that_fails_otherwise_is_an_error_of_all_ranks(comm, tmp_path, monkeypatch, error):
    """Oracle: the text; an error of files was the only one before."""

    def failing(*_):
        raise error

    monkeypatch.setattr(mpikfac.checkpoint.checkpoint, "write_shard", failing)
    with pytest.raises(mpikfac.UserError, match=f"writing checkpoint .*{type(error).__name__}: "):
        mpikfac.save_checkpoint(comm, tmp_path, {"a": 1}, 3)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("path", [None, b"runs", 3])
def test_what_is_no_path_is_refused(comm, path):
    """Oracle: the line."""
    for use in (
        lambda: mpikfac.save_checkpoint(comm, path, {"a": 1}, 3),
        lambda: mpikfac.load_checkpoint(comm, path),
        lambda: mpikfac.find_checkpoint(comm, path),
    ):
        with pytest.raises(
            (ValueError, mpikfac.UserError), match="must be a str or a pathlib.Path"
        ):
            use()


def test_the_home_directory_and_links_are_followed(comm, tmp_path, monkeypatch):
    """Oracle: the place of the files, and the line about a link to nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = mpikfac.save_checkpoint(comm, "~/runs", {"a": 1}, 3)
    assert path.parent == tmp_path / "runs" and path.is_dir()
    assert mpikfac.find_checkpoint(comm, "~/runs").path == path
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(
        mpikfac.UserError, match="link is a link to .*nothing, which does not exist"
    ):
        mpikfac.save_checkpoint(comm, tmp_path / "link", {"a": 1}, 3)
