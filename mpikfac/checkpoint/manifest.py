"""Describe a checkpoint's content in a manifest, and read checkpoints on a rank, without MPI.

    step-000000120/shard-0.h5, shard-1.h5, ..., manifest.json

The manifest names every item's shard, dtype and shape, and every shard's size and BLAKE3. The
last entry is the manifest's own BLAKE3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from mpikfac.checkpoint import durable
from mpikfac.checkpoint.shard import STORED, Value, check_shard, read_item, read_shard
from mpikfac.errors import UserError

FORMAT, VERSION = "mpikfac checkpoint", 2


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None; ask on a rank and broadcast.

    Collective over: none.
    """
    complete = durable.complete(Path(root))
    return complete[-1] if complete else None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in the directory `path`; an item is read on first access.

    Collective over: none.

    Raises:
        UserError: `path` holds no complete checkpoint of this format, or the manifest is damaged.
    """
    return Checkpoint(Path(path), _read_manifest(Path(path) / durable.MANIFEST))


class Checkpoint(Mapping[str, Value]):
    """Map the names of a checkpoint's items to values; tensors come on the CPU.

    Reading is local to a rank and lazy: the first item of a shard reads the whole file, and the
    bytes are kept as long as this object. Read inside `together`, so that a damaged file ends all
    ranks.

    Attributes:
        step: how many steps the run had taken.
        digest: BLAKE3 of the manifest, and so of the checkpoint's whole content.
        shards: `size` in bytes and `digest` of every file.

    Raises:
        UserError: the item is not in the checkpoint, or the item's file is missing or damaged.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.step: int = manifest["step"]
        self.digest: str = manifest["digest"]
        self.shards: Mapping[str, dict[str, Any]] = manifest["shards"]
        self._items = manifest["items"]
        self._open: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def get(self, name: str, default: Any = None) -> Any:
        """Return the item, or `default` if the checkpoint has no item of the name."""
        return self[name] if name in self else default  # noqa: SIM401 (`get` would call itself)

    def __getitem__(self, name: str) -> Value:
        if name not in self:
            raise UserError(f"checkpoint {self.path} has no item {name!r}")
        item = self._items[name]
        file = item["shard"]
        try:
            if file not in self._open:
                self._open[file] = read_shard(self.path / file, **self.shards[file])
            return read_item(self._open[file], name, item)
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / file}, item {name!r}: {error}") from error

    def described(self) -> dict[str, dict[str, Any]]:
        """Return every item's `shard`, `dtype`, `shape` and `bytes`; also a plain number's `value`.

        A dictionary by the item's name.
        """
        return dict(self._items)

    def check(self, file: str) -> None:
        """Check that a file of `shards` is unchanged since writing; HDF5 does not parse the file.

        Raises:
            UserError: the file is missing, or size or content differ.
        """
        check_shard(self.path / file, **self.shards[file])


def make_manifest(
    step: int,
    held: Sequence[Mapping[str, dict[str, Any]]],
    shares: Sequence[Sequence[str]],
    shards: Sequence[dict[str, Any] | None],
) -> bytes:
    """Return the manifest's text.

    Args:
        held: by rank, descriptions of the items that the rank holds, by name.
        shares: by rank, names of the items that the rank wrote.
        shards: by rank, `size` and `digest` of the rank's file; None: the rank wrote no file.
    """
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
    return json.dumps(manifest | {"digest": _digest(manifest)}).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with durable.read(path) as file:
            manifest: dict[str, Any] = json.load(file)
        form, version = manifest["format"], manifest["version"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing; this is no complete checkpoint") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (KeyError, RecursionError, TypeError, ValueError):
        raise UserError(f"{path} is damaged, or not the manifest of a checkpoint") from None
    if (form, version) != (FORMAT, VERSION):
        raise UserError(f"{path} is of {form} {version}; this program reads {FORMAT} {VERSION}")
    sealed = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest.get("digest") != _digest(sealed):
        raise UserError(f"{path} is damaged: its BLAKE3 does not match")
    try:
        _check_form(manifest)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the manifest of a checkpoint: {error!r}") from error
    except ValueError as error:
        raise UserError(f"{path} {error}") from error
    return manifest


def _check_form(manifest: Mapping[str, Any]) -> None:
    """Raise if the manifest differs in form from `make_manifest`; a right digest is no proof."""
    numbers = [manifest["step"]]
    for file, shard in manifest["shards"].items():
        if not re.fullmatch(r"shard-\d+\.h5", file):
            raise ValueError(f"names a file {file!r}; shards are called shard-<number>.h5")
        if shard.keys() != {"size", "digest"}:
            raise ValueError(f"describes {file} by {sorted(shard)}, not by digest and size")
        numbers.append(shard["size"])
    for name, item in manifest["items"].items():
        if item["shard"] not in manifest["shards"]:
            raise ValueError(
                f"has item {name!r} in {item['shard']!r}, which is not one of its files"
            )
        if item["dtype"] not in STORED and item["dtype"] != "str":
            raise ValueError(f"has item {name!r} of unknown dtype {item['dtype']!r}")
        numbers += [item["bytes"], *item["shape"]]
    if wrong := [number for number in numbers if type(number) is not int or number < 0]:
        raise ValueError(f"has {wrong[0]!r} where a count belongs")


def _digest(manifest: Mapping[str, Any]) -> str:
    return blake3(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
