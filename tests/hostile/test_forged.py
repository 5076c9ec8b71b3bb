"""Malicious files with correct digests: refused without following links."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from blake3 import blake3

import mpikfac
from mpikfac import UserError, find_checkpoint, save_checkpoint
from mpikfac.checkpoint import read_checkpoint
from support.forgery import manifest_of, seal
from support.forked import FORK, traced

MODULES = ("durable", "manifest", "restarts", "shard", "checkpoint")


@pytest.fixture
def path(tmp_path) -> Path:
    """Return a checkpoint with a single item, `x`: four zeros."""
    return save_checkpoint(mpikfac.world(), tmp_path / "root", {"x": torch.zeros(4)}, 1)


@pytest.fixture
def outside(tmp_path) -> Path:
    """Return a file of the user's own with another `x`."""
    with h5py.File(tmp_path / "outside.h5", "w") as file:
        file["x"] = np.ones(4, "f4")
    return tmp_path / "outside.h5"


def forge(path: Path, build: Callable[[h5py.File], object], **changes: object) -> None:
    """Replace the shard by a file that `build` fills, with a correct digest in the manifest."""
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        build(file)
    content = image.getvalue()
    (path / "shard-0.h5").write_bytes(content)
    manifest = manifest_of(path)
    digest = blake3(content).hexdigest()
    manifest["shards"]["shard-0.h5"] = {"size": len(content), "digest": digest}
    manifest["items"]["x"] |= changes
    seal(path, manifest)


def refusal(path: Path, name: str = "x") -> str:
    """Return the single line that refuses the checkpoint, at opening or at reading an item."""
    with pytest.raises(UserError) as refused:
        read_checkpoint(path)[name]
    assert "\n" not in str(refused.value)
    return str(refused.value)


def soft_link(file: h5py.File) -> None:
    file["y"] = np.zeros(4, "f4")
    file["x"] = h5py.SoftLink("/y")


def unknown_filter(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((2,))
    created.set_filter(32768, h5py.h5z.FLAG_OPTIONAL, (1, 2))
    kind, space = h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,))
    h5py.h5d.create(file.id, b"x", kind, space, dcpl=created)


def link_to_a_link(file: h5py.File) -> None:
    file["x"] = h5py.SoftLink("/y")
    file["y"] = h5py.ExternalLink("outside.h5", "x")


FORGERIES: dict[str, tuple[Callable[[h5py.File, Path], object], str]] = {
    "group": (lambda file, _: file.create_group("x"), "not a dataset of this file"),
    "type": (lambda file, _: file.__setitem__("x", np.dtype("f4")), "not a dataset of this file"),
    "soft link": (lambda file, _: soft_link(file), "not a dataset of this file"),
    "link to a link": (lambda file, _: link_to_a_link(file), "not a dataset of this file"),
    "external link": (
        lambda file, other: file.__setitem__("x", h5py.ExternalLink(other, "x")),
        "not a dataset of this file",
    ),
    "external storage": (
        lambda file, other: file.create_dataset("x", (4,), "f4", external=[(other, 0, 16)]),
        "not stored in one piece",
    ),
    "virtual": (
        lambda file, other: file.create_virtual_dataset("x", virtual(other)),
        "not stored in one piece",
    ),
    "chunks": (
        lambda file, _: file.create_dataset("x", (4,), "f4", chunks=(2,)),
        "not stored in one piece",
    ),
    "unknown filter": (lambda file, _: unknown_filter(file), "not stored in one piece"),
    "other dtype": (lambda file, _: file.create_dataset("x", (4,), "f8"), "is float64"),
    "other shape": (lambda file, _: file.create_dataset("x", (5,), "f4"), "(5,), not float32 (4,)"),
    "objects": (lambda file, _: file.create_dataset("x", (4,), h5py.string_dtype()), "is object"),
    "references": (lambda file, _: file.create_dataset("x", (4,), h5py.ref_dtype), "is object"),
    "ragged": (lambda file, _: file.create_dataset("x", (4,), h5py.vlen_dtype("f4")), "is object"),
    "compound": (
        lambda file, _: file.create_dataset("x", (4,), [("a", "f4")]),
        "is [('a', '<f4')]",
    ),
    "missing": (lambda file, _: file.create_dataset("y", (4,), "f4"), "item 'x'"),
}


def virtual(other: Path) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(other), "x", (4,))
    return layout


@pytest.mark.parametrize("forgery", FORGERIES)
def test_only_plain_datasets_of_the_file_itself_are_read(path, outside, forgery) -> None:
    """Oracle: the shard matches the manifest, but the item is no plain dataset of its dtype."""
    build, reason = FORGERIES[forgery]
    forge(path, lambda file: build(file, outside))
    message = refusal(path)
    assert reason in message and str(path / "shard-0.h5") in message
    forge(path, lambda file: file.create_dataset("x", (4,), "f4"))
    assert read_checkpoint(path)["x"].tolist() == [0, 0, 0, 0]


def test_names_do_not_lead_through_groups(path, outside) -> None:
    """Oracle: the item is missing, though HDF5 finds an item of the same name behind the link."""

    def build(file: h5py.File) -> None:
        file["a"] = h5py.ExternalLink(outside, "/")
        file["b"] = h5py.SoftLink("/")
        file["x"] = np.zeros(4, "f4")

    forge(path, build)
    manifest = manifest_of(path)
    for name in ("a/x", "b/x", "../root/x", "./x", "/x", "."):
        seal(path, manifest | {"items": {name: manifest["items"]["x"]}})
        assert f"item {name!r}" in refusal(path, name)


def test_pickles_in_attributes_are_not_read(path, tmp_path) -> None:
    """Oracle: unpickling would make a file; no file appears. The item is as stored."""

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    def build(file: h5py.File) -> None:
        file["x"] = np.zeros(4, "f4")
        file.attrs["pickle"] = file["x"].attrs["pickle"] = np.void(pickle.dumps(Bomb()))

    forge(path, build)
    assert read_checkpoint(path)["x"].tolist() == [0, 0, 0, 0]
    assert not (tmp_path / "exploded").exists()


def test_no_module_on_the_path_unpickles() -> None:
    """Oracle: the syntax trees."""
    for module in MODULES:
        tree = ast.parse(
            (Path(mpikfac.__file__).parent / "checkpoint" / f"{module}.py").read_text()
        )
        words = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(tree)}
        assert not words & {"pickle", "load_module", "eval", "exec"}
        assert not any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            for node in ast.walk(tree)
        )


def test_a_shape_larger_than_the_file_takes_no_memory(path) -> None:
    """Oracle: the peak of a process that reads: below twice a file of 32 MiB, 1 TiB declared."""

    def build(file: h5py.File) -> None:
        file["y"] = np.ones(2**23, "f4")
        file.create_dataset("x", (2**38,), "f4")

    forge(path, build, shape=[2**38], bytes=2**40)
    growth = FORK.Value("q", -1, lock=False)

    def peak() -> int:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    def job() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = peak()
        assert "larger than its file" in refusal(path)
        growth.value = peak() - before

    process = FORK.Process(target=job)
    process.start()
    process.join()
    assert 0 < growth.value < 2 * (path / "shard-0.h5").stat().st_size


def test_nothing_outside_of_the_checkpoint_is_opened(path, outside, tmp_path) -> None:
    """Oracle: the files in strace's log of a process that reads every forgery."""
    shutil.copy(outside, path.parent)
    receive, send = os.pipe()
    forged = []
    for number, (build, _) in enumerate(FORGERIES.values()):
        copy = tmp_path / "forged" / f"step-{number:09d}"
        shutil.copytree(path, copy)
        forge(copy, lambda file: build(file, outside))  # noqa: B023
        forged.append(copy)

    def job() -> None:
        os.read(receive, 1)
        for copy in forged:
            refusal(copy)

    reader = FORK.Process(target=job)
    reader.start()
    log = tmp_path / "log"
    with traced(reader, log, "--trace=%file"):
        os.write(send, b"g")
        reader.join()
    os.close(receive)
    os.close(send)
    assert reader.exitcode == 0
    calls = [line for line in log.read_text().splitlines() if "getcwd" not in line]
    paths = [Path(found) for found in re.findall(r'"([^"]*)"', "".join(calls)) if found]
    assert len(paths) >= 2 * len(FORGERIES)
    assert {path.parent for path in paths} - {Path("/dev")} == set(forged)


def test_a_manifest_cannot_point_out_of_its_directory(path, tmp_path) -> None:
    """Oracle: the message shows the name; the file of the name exists."""
    manifest = manifest_of(path)
    shutil.copy(path / "shard-0.h5", tmp_path / "shard-0.h5")
    manifest["shards"]["../../shard-0.h5"] = manifest["shards"].pop("shard-0.h5")
    manifest["items"]["x"]["shard"] = "../../shard-0.h5"
    seal(path, manifest)
    assert "'../../shard-0.h5'" in refusal(path)


@pytest.mark.parametrize("file", ["manifest.json", "shard-0.h5"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_plain_file_is_refused(path, tmp_path, file, kind) -> None:
    """Oracle: the message names the file; a pipe would make the reader wait for ever."""
    (path / file).rename(tmp_path / file)
    if kind == "link":
        (path / file).symlink_to(tmp_path / file)
    elif kind == "pipe":
        os.mkfifo(path / file)
    else:
        (path / file).mkdir()
    assert f"{path / file} cannot be read" in refusal(path)
    with pytest.raises(UserError, match=f"{path / file} cannot be read"):
        find_checkpoint(mpikfac.world(), path.parent)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (("step",), "one"),
        (("step",), -1),
        (("shards",), []),
        (("shards", "shard-0.h5"), {"size": 3}),
        (("shards", "shard-0.h5"), 3),
        (("shards", "shard-0.h5", "size"), 1.5),
        (("shards", "shard-0.h5", "path"), "/etc/passwd"),
        (("items",), None),
        (("items", "x"), []),
        (("items", "x", "shard"), "shard-9.h5"),
        (("items", "x", "shard"), []),
        (("items", "x", "dtype"), "object"),
        (("items", "x", "shape"), 4),
        (("items", "x", "shape"), [-1]),
        (("items", "x", "shape"), ["4"]),
        (("items", "x", "bytes"), True),
    ],
)
def test_manifests_of_another_form_are_refused(path, part, value) -> None:
    """Oracle: a line that names the manifest; the manifest's digest is right."""
    manifest = manifest_of(path)
    target = manifest
    for key in part[:-1]:
        target = target[key]
    target[part[-1]] = value
    seal(path, manifest)
    assert str(path / "manifest.json") in refusal(path)


def test_a_manifest_without_end_is_refused(path) -> None:
    """Oracle: a line that names the manifest."""
    (path / "manifest.json").write_text("[" * 10**6)
    assert str(path / "manifest.json") in refusal(path)
