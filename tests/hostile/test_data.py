"""Data files and machines that would take memory or time: refused in one line, at once."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from mpikfac.predict import load_machine, published_machines
from mpikfac_apps.problems import datasets
from support.pace import paced

LIST = b"](" + b"K\x01" * 10 + b"e"
LISTS = LIST + b"".join(b"q%c" % i + b"0](" + b"h%c" % i * 10 + b"e" for i in range(12))
BOMBS = {
    "place in a table of 32 GiB": b"Nr\xff\xff\xff\x7f.",
    "place of a text": b"Np99999999999\n.",
    "bytes that are not there": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b".",
    "text that is not there": b"T\xff\xff\xff\x7f.",
    "number that is not there": b"\x8b\xff\xff\xff\x7f.",
    "a million lists": b"]" * 10**6 + b".",
    "a million levels": b"(" * 10**6 + b"t" * 10**6 + b".",
    "labels in lists of lists": b"}(U\x06labels" + LISTS + b"U\x04data" + LIST + b"u.",
    "keys that collide": b"}("
    + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(32_000))
    + b"u.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_would_take_memory_or_time(tmp_path, bomb) -> None:
    """Oracle: one line with the file's name, in less than 20 seconds."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(BOMBS[bomb])
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"{path} is not a batch of CIFAR-10: ") as refused:
        datasets.read_python(path)
    assert time.monotonic() - began < paced(20)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


@pytest.mark.parametrize("read", [datasets.read_python, datasets.read_binary, load_machine])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "huge"])
def test_what_is_no_file_of_data(tmp_path, read, kind) -> None:
    """Oracle: one line with the path and the kind."""
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"")
        os.truncate(path, 2**40)
    told = "it has .* bytes; at most" if kind == "huge" else f"it is a {kind}, not a regular file"
    with pytest.raises((OSError, ValueError), match=told) as refused:
        read(path if read is not load_machine else str(path))
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


MACHINE = json.loads(
    (Path(datasets.__file__).parents[3] / "mpikfac/predict/machines/a100-hdr.json").read_text()
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inside": {"latency": 10**400, "bandwidth": 1}}, "must be a finite number above 0"),
        ({"inside": {"latency": 1e300, "bandwidth": 1}}, "must be a finite number above 0"),
        ({"ranks_per_node": 10**400}, "must be a whole number >= 1"),
        ({"products": [[10**400, 1], [1, 1]]}, "must be a list of pairs of numbers"),
        ({"products": [[1e300, 1e300]]}, "must be pairs of positive numbers"),
        ({"name": ["a"]}, "name=['a'] must be a string"),
        ({"about": 3}, "about=3 must be an object"),
        ({"networks": [{"model": {}, "batch": 1}]}, "networks lacks the key"),
        ({"sources": []}, "sources=[] must be an object"),
        ({"hidden": "a" * 10**6}, "hidden='aaaaaaaaaaaa...aaaaaaaaaaaaa' must be"),
        ({"more": 1}, "has the unknown key 'more'"),
    ],
)
def test_numbers_that_no_machine_has(tmp_path, changes, message) -> None:
    """Oracle: one short line with the key."""
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE | changes))
    with pytest.raises(ValueError) as refused:
        load_machine(str(tmp_path / "machine.json"))
    assert message in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 40 + "1" + "}" * 40])
def test_a_machine_of_many_levels(tmp_path, text) -> None:
    """Oracle: one line with the levels; published machines are read."""
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(ValueError, match="machine=.*: it has more than 32 levels"):
        load_machine(str(tmp_path / "machine.json"))
    assert [load_machine(name).name for name in published_machines()]
