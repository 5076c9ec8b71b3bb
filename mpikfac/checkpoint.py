"""The run's state to and from HDF5: one directory per checkpoint, one file per writing rank.

    root/step-000000120/shard-0.h5, shard-1.h5, ..., manifest.json

The manifest names every item's shard, dtype and shape and every shard's size and SHA-256.
The only importer of h5py, which works on images in memory: libhdf5 crashes on a full disk, and does
not notice damage by itself, so bytes are written plainly and checked before it parses them.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import torch
from torch import Tensor

from mpikfac import durable
from mpikfac.comm import agree, together
from mpikfac.errors import UserError

Value = Tensor | int | float | str

FORMAT, VERSION = "mpikfac checkpoint", 1
SAME = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
# dtype in the manifest (torch's, or "int" and "float" of Python) -> dtype in HDF5
STORED = {name: np.dtype(name) for name in SAME} | {
    "bool": np.dtype("uint8"),
    "bfloat16": np.dtype("uint16"),
    "int": np.dtype("int64"),
    "float": np.dtype("float64"),
}


def save_checkpoint(
    comm: Any, root: str | Path, items: Mapping[str, Value], step: int, keep: int = 2
) -> Path:
    """Writes the items of all ranks as `root/step-<step>` and returns that path.

    An item that several ranks hold is equal on all of them and stored once. A checkpoint of the
    same step is replaced. On failure temporary files are removed and older ones are untouched.

    Args:
        root: a directory on a file system that all ranks share; made if missing.
        items: this rank's share, by name; the ranks' shares together are the checkpoint.
            A `bool` comes back as an `int`.
        keep: how many checkpoints to keep, up to this step; later ones are never deleted.

    Collective over: comm.

    Raises:
        ValueError: `step` is negative or `keep` is below 1.
        UserError: writing failed on some rank, ranks disagree, or an item cannot be stored.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step} must be at least 0 and keep={keep} at least 1")
    agree(comm, {"root": str(root), "step": step, "keep": keep})
    final = Path(root) / f"step-{step:09d}"
    partial = durable.partial(final)
    doing = f"writing checkpoint {final}"
    with together(comm, doing):
        described = {name: _describe(name, value) for name, value in items.items()}
    held = comm.gather(described)
    shares: list[list[str]] = []
    with together(comm, doing):
        if comm.rank == 0:
            shares = _assign(held)
            durable.begin(final)
    names = comm.scatter(shares)
    try:
        with together(comm, doing):
            shard = _write_shard(partial / f"shard-{comm.rank}.h5", items, names)
        shards = comm.gather(shard)
        with together(comm, doing):
            if comm.rank == 0:
                manifest = _manifest(step, held, shares, shards)
                durable.commit(final, json.dumps(manifest, indent=1).encode())
    except UserError:
        if comm.rank == 0:
            durable.abandon(final)
        raise
    with together(comm, f"deleting checkpoints older than {final}"):
        if comm.rank == 0:
            durable.prune(final, keep)
    return final


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None; ask on one rank and broadcast.

    Collective over: none.
    """
    complete = durable.complete(Path(root))
    return complete[-1] if complete else None


def load_checkpoint(comm: Any, path: str | Path) -> Checkpoint:
    """The items of all ranks that wrote the checkpoint, to be read when they are asked for.

    Any number of ranks may read. The path that rank 0 passes counts.

    Collective over: comm.

    Raises:
        UserError: there is no complete checkpoint of this format, or its manifest is damaged.
    """
    found = None
    with together(comm, f"reading checkpoint {path}"):
        if comm.rank == 0:
            found = Path(path), _read_manifest(Path(path) / durable.MANIFEST)
    return Checkpoint(*comm.bcast(found))


class Checkpoint(Mapping[str, Value]):
    """A checkpoint's items by name; tensors come on the CPU.

    Reading is local to a rank and lazy: the first item of a shard reads that file, whose bytes are
    kept as long as this object. Let `together` surround it, so that a damaged file ends all ranks.

    Raises:
        UserError: the item is not in the checkpoint, or its file is missing or damaged.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.step: int = manifest["step"]
        self._items = manifest["items"]
        self._shards = manifest["shards"]
        self._open: dict[str, h5py.File] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def get(self, name: str, default: Any = None) -> Any:
        """The item, or `default` if the checkpoint has none of that name."""
        return self[name] if name in self else default  # noqa: SIM401 (it would call itself)

    def __getitem__(self, name: str) -> Value:
        if name not in self:
            raise UserError(f"checkpoint {self.path} has no item {name!r}")
        item = self._items[name]
        shard = item["shard"]
        try:
            if shard not in self._open:
                content = _read_shard(self.path / shard, **self._shards[shard])
                self._open[shard] = h5py.File(io.BytesIO(content), "r")
            return _decode(self._open[shard], name, item)
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / shard}, item {name!r}: {error}") from error


def _describe(name: str, value: Value) -> dict[str, Any]:
    """What the ranks tell each other about an item: enough to choose a writer, and to compare."""
    if name in ("", "."):
        raise ValueError(f"item name {name!r} cannot name a dataset")
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in STORED:
            raise ValueError(f"item {name!r} has dtype {dtype}; use one of {', '.join(STORED)}")
        return {"dtype": dtype, "shape": list(value.shape), "bytes": value.nbytes}
    if isinstance(value, str):
        return {"dtype": "str", "shape": [], "bytes": len(value.encode())}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"item {name!r} is {value}, which takes more than 64 bits; store a str")
    if isinstance(value, int | float):
        dtype = "int" if isinstance(value, int) else "float"
        return {"dtype": dtype, "shape": [], "bytes": 8, "value": repr(value)}
    raise ValueError(f"item {name!r} is a {type(value).__name__}; use Tensor, int, float or str")


def _assign(held: Sequence[Mapping[str, dict[str, Any]]]) -> list[list[str]]:
    """Which names each rank writes: the least loaded of an item's holders, largest items first."""
    holders: dict[str, list[int]] = {}
    for rank, described in enumerate(held):
        for name, found in described.items():
            ranks = holders.setdefault(name, [])
            if ranks and found != (first := held[ranks[0]][name]):
                raise ValueError(
                    f"item {name!r} is {reprlib.repr(first)} on rank {ranks[0]} "
                    f"but {reprlib.repr(found)} on rank {rank}"
                )
            ranks.append(rank)
    size = {name: held[ranks[0]][name]["bytes"] for name, ranks in holders.items()}
    load = [0] * len(held)
    shares: list[list[str]] = [[] for _ in held]
    for name in sorted(holders, key=lambda name: (len(holders[name]) > 1, -size[name], name)):
        writer = min(holders[name], key=lambda rank: (load[rank], rank))
        load[writer] += size[name]
        shares[writer].append(name)
    return shares


def _write_shard(
    path: Path, items: Mapping[str, Value], names: Sequence[str]
) -> dict[str, Any] | None:
    if not names:
        return None
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name in sorted(names):
            file.create_dataset(_key(name), data=_encode(items[name]))
    content = image.getbuffer()
    durable.write(path, content)
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _manifest(
    step: int, held: list[Any], shares: list[list[str]], shards: list[Any]
) -> dict[str, Any]:
    files = [f"shard-{rank}.h5" for rank in range(len(shards))]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "shards": {file: shard for file, shard in zip(files, shards, strict=True) if shard},
        "items": {
            name: {"shard": file} | described[name]
            for file, described, names in zip(files, held, shares, strict=True)
            for name in sorted(names)
        },
    }
    return manifest | {"sha256": _digest(manifest)}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        form, version = manifest["format"], manifest["version"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing; this is no complete checkpoint") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged, or not the manifest of a checkpoint") from None
    if (form, version) != (FORMAT, VERSION):
        raise UserError(f"{path} is of {form} {version}; this program reads {FORMAT} {VERSION}")
    if manifest.pop("sha256", None) != _digest(manifest):
        raise UserError(f"{path} is damaged: its SHA-256 does not match")
    for shard in manifest["shards"]:
        if not re.fullmatch(r"shard-\d+\.h5", shard):
            raise UserError(f"{path} names a file {shard!r}; shards are called shard-<number>.h5")
    return manifest


def _read_shard(path: Path, size: int, sha256: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    if len(content) != size:
        raise UserError(f"{path} is damaged: {len(content)} bytes, {size} were written")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is not that of what was written")
    return content


def _key(name: str) -> str:
    """The dataset's name: "/" would make groups, in which names can collide with parts of names."""
    return quote(name, safe="")


def _encode(value: Value) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        stored = STORED[str(value.dtype).removeprefix("torch.")]
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return flat.numpy().view(stored).reshape(tuple(value.shape))
    if isinstance(value, str):
        text = value.encode()
        return np.array(text, h5py.string_dtype("utf-8", max(1, len(text))))
    return np.array(value, STORED["int" if isinstance(value, int) else "float"])


def _decode(file: h5py.File, name: str, item: Mapping[str, Any]) -> Value:
    """The item's value, if its dataset is what the manifest says, whole, and inside the file."""
    kind, shape = item["dtype"], tuple(item["shape"])
    link = file.get(_key(name), getlink=True)
    dataset = file[_key(name)] if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError("is not a dataset of this file")
    created = dataset.id.get_create_plist()
    if created.get_layout() != h5py.h5d.CONTIGUOUS or created.get_external_count():
        raise ValueError("is not stored in one piece")
    expected = np.dtype(f"S{max(1, item['bytes'])}") if kind == "str" else STORED[kind]
    if (dataset.dtype, dataset.shape) != (expected, shape):
        raise ValueError(f"is {dataset.dtype} {dataset.shape}, not {expected} {shape}")
    if dataset.nbytes > file.id.get_filesize():
        raise ValueError("is larger than its file")
    array = dataset[()]
    if kind == "str":
        return array.ljust(item["bytes"], b"\0").decode()  # numpy drops NULs at the end
    if kind in ("int", "float"):
        return array.item()
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, kind)).reshape(shape)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
