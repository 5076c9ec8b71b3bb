from __future__ import annotations

import io
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from blake3 import blake3

from mpikfac.checkpoint import durable
from mpikfac.checkpoint.shard import PIECE, checksum, read_shard, write_shard
from support.forked import FORK

ITEMS = {
    "model/conv1.weight": torch.rand(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": torch.rand(30, 20).T,
    "half": torch.rand(10).bfloat16(),
    "larger than a piece": torch.rand(PIECE // 4 + 1000),
    "one": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "trainer/steps": 7,
    "lr": 0.1,
    "text": "Größe",
}


def test_plain_h5py_reads_the_file(tmp_path) -> None:
    """Oracle: numpy's values of the items, from the file on disk, by HDF5's own driver."""
    path = tmp_path / "shard-0.h5"
    write_shard(path, ITEMS)
    with h5py.File(path) as file:
        assert np.array_equal(file["model%2Fconv1.weight"], ITEMS["model/conv1.weight"].numpy())
        assert np.array_equal(file["transposed"], ITEMS["transposed"].numpy())
        assert np.array_equal(file["half"], ITEMS["half"].view(torch.int16).numpy().view("u2"))
        assert np.array_equal(file["larger%20than%20a%20piece"], ITEMS["larger than a piece"])
        assert file["one"][()] == 1.5 and file["empty"].shape == (0, 3)
        assert file["trainer%2Fsteps"][()] == 7 and file["lr"][()] == 0.1
        assert file["text"][()].decode() == "Größe"
        assert len(file) == len(ITEMS)
        assert all(dataset.chunks is None for dataset in file.values())


def test_hdf5_itself_writes_the_same_datasets(tmp_path) -> None:
    """Oracle: a file that h5py writes on disk: the same names, dtypes and values."""
    write_shard(tmp_path / "ours", {"x": torch.arange(1000), "y": 0.5})
    with h5py.File(tmp_path / "theirs", "w") as theirs, h5py.File(tmp_path / "ours") as ours:
        theirs["x"], theirs["y"] = np.arange(1000), 0.5
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert np.array_equal(ours[name], theirs[name])


def test_size_and_digest_are_those_of_the_file(tmp_path) -> None:
    """Oracle: the file's own bytes."""
    path = tmp_path / "shard-0.h5"
    written, content = write_shard(path, ITEMS), path.read_bytes()
    assert written == {"size": len(content), "digest": blake3(content).hexdigest()}
    assert len(read_shard(path, **written)) == len(ITEMS)


def test_many_items(tmp_path) -> None:
    """Oracle: every item's number; HDF5's own index of the items takes many pages."""
    path = tmp_path / "shard-0.h5"
    items = {f"layer{n}/{'long' * (n % 50)}": torch.full((n % 7,), n) for n in range(3000)}
    written = write_shard(path, items)
    file = read_shard(path, **written)
    assert len(file) == 3000
    for name, value in items.items():
        assert np.array_equal(file[name.replace("/", "%2F")], value)


def test_what_the_system_takes_in_parts_is_written_whole(tmp_path, monkeypatch) -> None:
    """Oracle: the bytes of a file that the system writes at once."""

    class Slow(io.FileIO):
        def write(self, content) -> int:
            return super().write(bytes(content[:100_000]))

    whole = write_shard(tmp_path / "whole", ITEMS)
    monkeypatch.setattr(
        durable, "open", lambda path, mode: io.BufferedWriter(Slow(path, mode)), raising=False
    )
    assert write_shard(tmp_path / "parts", ITEMS) == whole
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_writing_takes_no_copy_of_the_items(tmp_path) -> None:
    """Oracle: the peak of a process that writes 64 MiB, against the earlier peak."""
    items = {"large": torch.ones(2**24), "small": torch.ones(100, 100).T}
    growth = FORK.Value("q", -1, lock=False)

    def peak() -> int:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    def job() -> None:
        items["large"].sum()  # the parent's memory counts after the first touch
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = peak()
        write_shard(tmp_path / "shard-0.h5", items)
        growth.value = peak() - before

    process = FORK.Process(target=job)
    process.start()
    process.join()
    assert 0 <= growth.value < 2**24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_checksums_are_those_of_values(dtype) -> None:
    """Oracle: equal values have equal sums, for any strides; a single changed bit changes a sum."""
    value = torch.rand(6, 5, 4, 3).mul(200).to(dtype)
    same = value.contiguous(memory_format=torch.channels_last)
    assert checksum(value) == checksum(same) == checksum(value.permute(3, 1, 2, 0).clone())
    for shift in range(8):
        other = value.clone()
        other.view(-1).view(torch.uint8)[17] ^= 1 << shift
        assert checksum(other) != checksum(value)
    assert checksum("ab") == checksum("ab") != checksum("ba")
