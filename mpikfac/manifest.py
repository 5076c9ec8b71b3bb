"""What a checkpoint holds, and its reading by one rank; no MPI.

    step-000000120/shard-0.h5, shard-1.h5, ..., manifest.json

The manifest names every item's shard, dtype and shape, every shard's size and SHA-256, and ends
with a SHA-256 of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpikfac import durable
from mpikfac.errors import UserError
from mpikfac.shard import Value, check_shard, read_item, read_shard

FORMAT, VERSION = "mpikfac checkpoint", 1


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None; ask on one rank and broadcast.

    Collective over: none.
    """
    complete = durable.complete(Path(root))
    return complete[-1] if complete else None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in the directory `path`; its items are read when they are asked for.

    Collective over: none.

    Raises:
        UserError: there is no complete checkpoint of this format, or its manifest is damaged.
    """
    return Checkpoint(Path(path), _read_manifest(Path(path) / durable.MANIFEST))


class Checkpoint(Mapping[str, Value]):
    """A checkpoint's items by name; tensors come on the CPU.

    Reading is local to a rank and lazy: the first item of a shard reads that file, whose bytes are
    kept as long as this object. Let `together` surround it, so that a damaged file ends all ranks.

    Attributes:
        step: how many steps the run had taken.
        sha256: of the manifest, and so of all that the checkpoint holds.
        shards: `size` in bytes and `sha256` of every file.

    Raises:
        UserError: the item is not in the checkpoint, or its file is missing or damaged.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.step: int = manifest["step"]
        self.sha256: str = manifest["sha256"]
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
        """The item, or `default` if the checkpoint has none of that name."""
        return self[name] if name in self else default  # noqa: SIM401 (it would call itself)

    def __getitem__(self, name: str) -> Value:
        if name not in self:
            raise UserError(f"checkpoint {self.path} has no item {name!r}")
        item = self._items[name]
        shard = item["shard"]
        try:
            if shard not in self._open:
                self._open[shard] = read_shard(self.path / shard, **self.shards[shard])
            return read_item(self._open[shard], name, item)
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / shard}, item {name!r}: {error}") from error

    def described(self) -> dict[str, dict[str, Any]]:
        """`shard`, `dtype`, `shape` and `bytes` of every item, and the `value` of plain numbers."""
        return dict(self._items)

    def check(self, shard: str) -> None:
        """Returns if the file of that name is what was written; HDF5 does not parse it.

        Raises:
            UserError: it is missing, or of another size or content.
        """
        check_shard(self.path / shard, **self.shards[shard])


def make_manifest(
    step: int,
    held: Sequence[Mapping[str, dict[str, Any]]],
    shares: Sequence[Sequence[str]],
    shards: Sequence[dict[str, Any] | None],
) -> bytes:
    """The manifest's text.

    Args:
        held: descriptions of the items that each rank holds, by name.
        shares: names of the items that each rank wrote.
        shards: `size` and `sha256` of the file of each rank; None: it wrote nothing.
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
    return json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1).encode()


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
    sealed = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _digest(sealed):
        raise UserError(f"{path} is damaged: its SHA-256 does not match")
    for shard in manifest["shards"]:
        if not re.fullmatch(r"shard-\d+\.h5", shard):
            raise UserError(f"{path} names a file {shard!r}; shards are called shard-<number>.h5")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
