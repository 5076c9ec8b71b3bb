from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import h5py
import pytest
import torch

from mpikfac import CheckpointWriter, UserError, find_checkpoint, load_checkpoint, save_checkpoint
from mpikfac.checkpoint import checkpoint, latest_checkpoint
from mpikfac.comm import together
from mpikfac.errors import RanksDifferError
from support.pace import paced

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.complex64,
    torch.complex128,
)


@pytest.fixture
def root(comm, tmp_path) -> Path:
    """Return a directory that all ranks share."""
    return comm.bcast(tmp_path)


def whole_state(ranks: int) -> dict:
    """Return the joint state of a run on `ranks` ranks; every rank can compute the state."""
    state = {"trainer/steps": 120, "lr": 0.1, "config": "damping: 0.003 µ"}
    for number, dtype in enumerate(DTYPES):
        for shape in [(), (0,), (3, 0), (7,), (5, 3)]:
            generator = torch.Generator().manual_seed(number)
            values = torch.randint(0, 200, shape, generator=generator, device="cpu")
            state[f"model/{dtype}{list(shape)}"] = values.to(dtype)
    for rank in range(ranks):
        state[f"factors/layer{rank}"] = torch.full((10 + rank,), float(rank))
    return state


def share(state: dict, rank: int, ranks: int) -> dict:
    """Return a rank's items: items are held by all ranks, by a single rank or by two ranks."""
    mine = {}
    for number, (name, value) in enumerate(state.items()):
        holders = [range(ranks), [number % ranks], [number % ranks, (number + 1) % ranks]]
        if rank in holders[number % 3]:
            mine[name] = value
    return mine


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and a == b


def check(checkpoint, state: dict) -> None:
    assert sorted(checkpoint) == sorted(state)
    assert all(same(checkpoint[name], value) for name, value in state.items())


def refused(comm, root: Path, items: dict, step: int) -> str:
    """Return the text with which all ranks refuse to save; check that the text is the same."""
    with pytest.raises(UserError) as error:
        save_checkpoint(comm, root, items, step)
    texts = comm.allgather(str(error.value))
    assert len(set(texts)) == 1 and "\n" not in texts[0]
    return texts[0]


def test_round_trip_with_different_holders(comm, root) -> None:
    """Oracle: the state, computed by every rank."""
    state = whole_state(comm.size)
    path = save_checkpoint(comm, root, share(state, comm.rank, comm.size), 120)
    assert path == root / "step-000000120"
    check(load_checkpoint(comm, path), state)


def test_items_of_several_ranks_are_stored_once_and_spread(comm, root) -> None:
    """Oracle: the datasets found by plain h5py; equal items, so equal shares."""
    items = {f"model/{number}": torch.zeros(64) for number in range(3 * comm.size)}
    path = save_checkpoint(comm, root, items, 1)
    counts = []
    for shard in path.glob("shard-*.h5"):
        with h5py.File(shard) as file:
            counts.append(len(file))
    assert counts == [3] * comm.size


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_written_by_all_ranks_read_by_fewer(comm, root, readers) -> None:
    """Oracle: the saved state, on groups of `readers` ranks."""
    state = whole_state(comm.size)
    path = save_checkpoint(comm, root, share(state, comm.rank, comm.size), 5)
    check(load_checkpoint(comm.Split(comm.rank // readers), path), state)


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_written_by_few_ranks_read_by_all(comm, root, writers) -> None:
    """Oracle: the state saved by the first `writers` ranks."""
    writers = min(writers, comm.size)
    state = whole_state(writers)
    some = comm.Split(comm.rank >= writers)
    if comm.rank < writers:
        save_checkpoint(some, root, share(state, some.rank, some.size), 5)
    comm.Barrier()
    check(load_checkpoint(comm, root / "step-000000005"), state)


def test_rank_0_says_which_checkpoint(comm, root) -> None:
    """Oracle: the step named by rank 0, for any newest step on further ranks."""
    for step in (1, 2):
        save_checkpoint(comm, root, {"x": step}, step)
    checkpoint = load_checkpoint(comm, root / f"step-{1 if comm.rank == 0 else 2:09d}")
    assert checkpoint["x"] == checkpoint.step == 1


@pytest.mark.parametrize("failing", ["first", "last"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_write_on_one_rank_is_known_to_all(
    comm, root, monkeypatch, call, failing
) -> None:
    """Oracle: the older checkpoint alone is left, and the next save works."""
    older = save_checkpoint(comm, root, {"x": 1}, 1)
    rank = 0 if failing == "first" or call == "replace" else comm.size - 1
    # every rank has an own item to write, so that every rank can fail
    items = {f"factors/{comm.rank}": torch.ones(9)}

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if comm.rank == rank:
            patch.setattr(os, call, full)
        text = refused(comm, root, items, 2)
    assert "step-000000002" in text and "No space left on device" in text
    assert comm.bcast(os.listdir(root)) == [older.name]
    assert comm.bcast(latest_checkpoint(root)) == older
    assert load_checkpoint(comm, older)["x"] == 1
    path = save_checkpoint(comm, root, items, 2)
    assert len(load_checkpoint(comm, path)) == comm.size


def test_an_item_that_cannot_be_stored_on_one_rank_is_known_to_all(comm, root) -> None:
    """Oracle: the item's name in every rank's error; nothing was written."""
    items = {"x": [1] if comm.rank == comm.size - 1 else 1}
    assert "item 'x' is a list" in refused(comm, root, items, 1)
    assert comm.bcast(os.listdir(root)) == []


def test_ranks_that_disagree_are_told(comm, root) -> None:
    """Oracle: the message names the difference; nothing was written."""
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    assert "step" in refused(comm, root, {}, comm.rank)
    text = refused(comm, root, {"x": torch.zeros(3 + (comm.rank == 1))}, 1)
    assert "item 'x'" in text and "rank 1" in text
    text = refused(comm, root, {"trainer/epoch": comm.rank}, 1)
    assert "item 'trainer/epoch'" in text
    assert comm.bcast(os.listdir(root)) == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_shard_is_refused_by_all(comm, root, damage) -> None:
    """Oracle: a line with the file's name on every rank, though only one rank needs the item."""
    name = f"factors/{comm.rank}"
    path = save_checkpoint(comm, root, {name: torch.ones(500)}, 1)
    victim = path / f"shard-{comm.size - 1}.h5"
    if comm.rank == 0:
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "missing":
            victim.unlink()
        else:
            victim.write_bytes(content if damage == "flipped" else content[:-7])
    comm.Barrier()
    checkpoint = load_checkpoint(comm, path)
    with pytest.raises(UserError, match=str(victim)), together(comm, f"resuming from {path}"):
        checkpoint[name]


def test_a_missing_manifest_is_refused_by_all(comm, root) -> None:
    """Oracle: the message names the file."""
    path = save_checkpoint(comm, root, {"x": 1}, 1)
    comm.Barrier()
    if comm.rank == 0:
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"{path / 'manifest.json'} is missing"):
        load_checkpoint(comm, path)


def test_the_manifest_is_written_after_all_shards(comm, root, monkeypatch) -> None:
    """Oracle: the temporary directory's files when rank 0 opens the manifest."""
    seen = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "manifest.json":
            seen.extend(sorted(found.name for found in path.parent.glob("shard-*")))
            shards = json.loads(path.read_text())["shards"]
            sizes = {name: (path.parent / name).stat().st_size for name in seen}
            assert sizes == {name: shard["size"] for name, shard in shards.items()}
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    save_checkpoint(comm, root, {f"factors/{comm.rank}": torch.ones(500)}, 1)
    assert comm.bcast(seen) == [f"shard-{rank}.h5" for rank in range(comm.size)]


def test_written_in_the_background(comm, root) -> None:
    """Oracle: the state at the call, for any later change of tensors; all ranks know the path."""
    writer = CheckpointWriter(comm, root)
    state = whole_state(comm.size)
    for step in (5, 6):
        items = share(whole_state(comm.size), comm.rank, comm.size)
        writer.begin(items, step)
        for value in items.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        assert comm.allgather(writer.pending) == [True] * comm.size
    path = writer.commit()
    assert comm.allgather(path) == [root / "step-000000006"] * comm.size
    assert not writer.pending and writer.commit() is None
    check(load_checkpoint(comm, path), state)
    check(load_checkpoint(comm, root / "step-000000005"), state)


def test_a_failure_in_the_background_on_one_rank_is_known_to_all(comm, root, monkeypatch) -> None:
    """Oracle: the same text on all ranks at the commit; only the older checkpoint is left."""
    older = save_checkpoint(comm, root, {"x": 1}, 1)
    writer = CheckpointWriter(comm, root)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(os, "fsync", full)
        writer.begin({f"factors/{comm.rank}": torch.ones(9)}, 2)
        with pytest.raises(UserError) as error:
            writer.commit()
    texts = comm.allgather(str(error.value))
    assert len(set(texts)) == 1 and f"shard-{comm.size - 1}.h5" in texts[0]
    assert comm.bcast(os.listdir(root)) == [older.name]


@pytest.mark.parametrize("value", [torch.ones(9), torch.ones(9, dtype=torch.complex64), "text"])
def test_an_item_that_differs_between_ranks_is_named(comm, root, value) -> None:
    """Oracle: the message names item and rank; nothing is left; the values have equal shapes."""
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    other = value + 1e-7 if isinstance(value, torch.Tensor) else value[::-1]
    items = {"same": torch.ones(5), "model/weight": other if comm.rank == 1 else value}
    text = refused(comm, root, items, 1)
    assert "item 'model/weight' has different values on rank 1 and rank 0" in text
    assert comm.bcast(os.listdir(root)) == []


def test_a_damaged_shard_makes_all_ranks_go_back(comm, root, caplog) -> None:
    """Oracle: the step before on every rank; rank 0 names the damaged file."""
    for step in (1, 2):
        save_checkpoint(comm, root, {f"factors/{comm.rank}": torch.ones(500)}, step)
    victim = root / "step-000000002" / f"shard-{comm.size - 1}.h5"
    if comm.rank == 0:
        os.truncate(victim, 1000)
    comm.Barrier()
    found = find_checkpoint(comm, root)
    assert comm.allgather(found.step) == [1] * comm.size
    assert (f"{victim} is damaged" in caplog.text) == (comm.rank == 0)


@pytest.mark.parametrize("lag", [0.3, 60])
def test_files_that_one_rank_does_not_see_yet(comm, root, monkeypatch, lag) -> None:
    """Oracle: the checkpoint, once the files are seen; else the same line on all ranks."""
    save_checkpoint(comm, root, {f"factors/{comm.rank}": torch.ones(5)}, 1)
    seen, begun = checkpoint._files, time.monotonic()
    late = comm.rank == comm.size - 1 and comm.size > 1

    def files(directories):
        found = seen(directories)
        if late and time.monotonic() < begun + lag:
            found.pop(str(root / "step-000000001" / "shard-0.h5"))
        return found

    monkeypatch.setattr(checkpoint, "_files", files)
    monkeypatch.setattr(checkpoint, "PATIENCE", paced(1))
    if lag < 1 or comm.size == 1:
        assert find_checkpoint(comm, root).step == 1
    else:
        with pytest.raises(UserError, match=r"shard-0\.h5 .*ranks see different directories"):
            find_checkpoint(comm, root)


@pytest.mark.parametrize("differs", ["values", "shape", "step", "kind"])
def test_ranks_that_differ_raise_an_error_of_their_own(comm, root, differs) -> None:
    """Oracle: the type; trying again is of no use, as it is after a failure to write."""
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    last = comm.rank == comm.size - 1
    value = torch.ones(3)
    if last:
        others = {"values": value + 1, "shape": torch.ones(4), "kind": 1.0}
        value = others.get(differs, value)
    for _ in range(2):
        with pytest.raises(RanksDifferError):
            save_checkpoint(comm, root, {"a": value}, 2 if last and differs == "step" else 1)
    with pytest.raises(UserError) as failed:
        save_checkpoint(comm, root, {"a": object() if last else torch.ones(3)}, 1)
    assert not isinstance(failed.value, RanksDifferError)
