"""Describe a checkpoint's content in a manifest, and read checkpoints on one rank without MPI.

    step-000000120/shard-0.h5, shard-1.h5, ..., manifest.json

The manifest lists every item's shard, dtype and shape, and every shard's size and BLAKE3 digest.
The last entry is the manifest's own BLAKE3 digest.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

from mpikfac import files
from mpikfac.checkpoint import durable
from mpikfac.checkpoint.shard import STORED, Value, check_shard, read_item, read_shard
from mpikfac.errors import UserError

FORMAT, VERSION = "mpikfac checkpoint", 3
MOST_STEPS = 2**53
"""The highest valid step; no run takes more steps, and float64 cannot count beyond it."""
log = logging.getLogger("mpikfac")

UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""The exceptions that can occur when reading a file of unknown content."""


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None; call this on a single rank.

    A newer checkpoint without a manifest is damaged, and is skipped with a warning.

    Collective over: none.
    """
    for path in reversed(durable.named(durable.directory_of(root))):
        if (path / durable.MANIFEST).is_file():
            tell_of_renamed(path.parent, durable.step_of(path) or 0)
            return path
        log.warning("%s is skipped: %s is missing", path, durable.MANIFEST)
    tell_of_renamed(durable.directory_of(root), -1)
    return None


def tell_of_renamed(root: Path, step: int) -> None:
    """Warn about checkpoints of steps after `step` whose directories were renamed.

    Collective over: none.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if durable.step_of(path) is None and not path.name.startswith("."):
            with suppress(OSError, UserError):
                later = read_checkpoint(path).step
                if later > step:
                    log.warning(
                        "%s holds step %d, and is skipped; rename it to step-%09d to use it",
                        *(path, later, later),
                    )


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in the directory `path`; an item is read on first access.

    Collective over: none.

    Raises:
        UserError: `path` is not a complete checkpoint of this format, the manifest is damaged, or
            the directory's name contains a different step.
    """
    checkpoint = Checkpoint(Path(path), _read_manifest(Path(path) / durable.MANIFEST))
    if durable.step_of(checkpoint.path) not in (None, checkpoint.step):
        raise UserError(
            f"{path} has the manifest of step {checkpoint.step}: it was renamed or damaged"
        )
    return checkpoint


class Checkpoint(Mapping[str, Value]):
    """Map the names of a checkpoint's items to values; tensors are on the CPU.

    Reading is local to a rank and lazy: accessing the first item of a shard reads the whole file,
    whose bytes are kept as long as this object exists. Read items inside `together`, so that a
    damaged file raises the same error on all ranks.

    Attributes:
        step: the number of steps that the run had taken.
        writer: the version that wrote the checkpoint, such as "mpikfac 0.1.0"; "" if unknown.
        digest: the BLAKE3 digest of the manifest, and thus of the checkpoint's whole content.
        shards: `size` in bytes and `digest` of every file, by file name.

    Raises:
        UserError: the item is not in the checkpoint, or the item's file is missing or damaged.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.step: int = manifest["step"]
        self.writer: str = manifest.get("writer", "")
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
        """Return the item, or `default` if the checkpoint has no item of that name."""
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
        except UNREADABLE as error:
            raise UserError(f"{self.path / file}, item {name!r}: {error}") from error

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each item's `shard`, `dtype`, `shape` and `bytes`, by name.

        The entry of a plain number also contains its `value`.
        """
        return dict(self._items)

    def check(self, file: str) -> None:
        """Check that a file of `shards` is unchanged since it was written, without parsing it.

        Raises:
            UserError: the file is missing, or its size or content differs.
        """
        check_shard(self.path / file, **self.shards[file])


def make_manifest(
    step: int,
    held: Sequence[Mapping[str, dict[str, Any]]],
    shares: Sequence[Sequence[str]],
    shards: Sequence[dict[str, Any] | None],
) -> bytes:
    """Return the content of the manifest file.

    Args:
        held: descriptions of the items that each rank holds, by rank and name.
        shares: the names of the items that each rank wrote, by rank.
        shards: `size` and `digest` of each rank's file, by rank; None if the rank wrote no file.
    """
    names = [f"shard-{rank}.h5" for rank in range(len(shards))]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "writer": f"mpikfac {metadata.version('mpikfac')}",
        "step": step,
        "shards": {file: shard for file, shard in zip(names, shards, strict=True) if shard},
        "items": {
            name: {"shard": file} | described[name]
            for file, described, share in zip(names, held, shares, strict=True)
            for name in sorted(share)
        },
    }
    text = json.dumps(manifest | {"digest": _digest(manifest)}).encode()
    if len(text) > files.LIMIT:
        raise ValueError(f"the manifest has {len(text):,} bytes; at most {files.LIMIT:,} are read")
    return text


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = files.read_json(path)
        form, version = manifest["format"], manifest["version"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing; this is not a complete checkpoint") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {files.why(error)}") from error
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged, or is not the manifest of a checkpoint") from None
    if (form, version) != (FORMAT, VERSION):
        raise UserError(
            f"{path} has the format {form} {version}; this program reads {FORMAT} {VERSION}"
        )
    sealed = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest.get("digest") != _digest(sealed):
        raise UserError(f"{path} is damaged: its BLAKE3 digest does not match")
    try:
        _check_form(manifest)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the manifest of a checkpoint: {error!r}") from error
    except ValueError as error:
        raise UserError(f"{path} {error}") from error
    return manifest


def _check_form(manifest: Mapping[str, Any]) -> None:
    """Check that the manifest has the format that `make_manifest` writes, except for its digest."""
    numbers = [manifest["step"]]
    if not isinstance(writer := manifest.get("writer", ""), str):
        raise ValueError(f"has writer={writer!r}, which is not a str; use another checkpoint")
    if type(manifest["step"]) is int and manifest["step"] > MOST_STEPS:
        raise ValueError(f"has step {manifest['step']}, more than any run takes")
    for file, shard in manifest["shards"].items():
        if not re.fullmatch(r"shard-\d+\.h5", file):
            raise ValueError(f"names a file {file!r}; shards are called shard-<number>.h5")
        if shard.keys() != {"size", "digest"}:
            raise ValueError(
                f"describes {file} with the keys {sorted(shard)}, not with digest and size"
            )
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
        raise ValueError(f"has {wrong[0]!r} in place of a non-negative integer")


def _digest(manifest: Mapping[str, Any]) -> str:
    return blake3(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
