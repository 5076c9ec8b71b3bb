"""Write and read the state of a run as checkpoints, to which all ranks contribute.

Every rank writes its shard to a file; the checkpoint is complete once all files are on disk.
"""

from __future__ import annotations

import logging
import operator
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from mpikfac.checkpoint import durable
from mpikfac.checkpoint.manifest import Checkpoint, make_manifest, read_checkpoint, tell_of_renamed
from mpikfac.checkpoint.restarts import TRIES, starts_from
from mpikfac.checkpoint.shard import Value, checksum, describe, write_shard
from mpikfac.comm import Comm, agree, together
from mpikfac.errors import RanksDifferError, UserError, looks
from mpikfac.plan.names import PARAM_GROUPS

PATIENCE = 5.0  # seconds within which all ranks must see the files that rank 0 sees

SOUND: dict[Path, object] = {}
"""Checkpoints that this process has written or checked, with their `_signature` at that time."""

log = logging.getLogger("mpikfac")


def save_checkpoint(
    comm: Comm, root: str | Path, items: Mapping[str, Value], step: int, keep: int = 2
) -> Path:
    """Write the items of all ranks to `root/step-<step>`, and return the path.

    An item that several ranks have must be equal on all of them, and is stored once. An existing
    checkpoint of the same step is replaced. On failure, temporary files are removed, and older
    checkpoints are left intact.

    Args:
        root: a directory on a file system that all ranks share; created if missing.
        items: this rank's items, by name; the items of all ranks form the checkpoint.
            A `bool` is loaded as an `int`.
        keep: how many checkpoints of this step or earlier to keep; later ones are never deleted.

    Collective over: comm.

    Raises:
        ValueError: `root` is not a path, `step` is negative or `keep` is below 1.
        UserError: writing failed on some rank, or an item cannot be stored.
        RanksDifferError: ranks disagree on `root`, `step` or `keep`, or on an item.
    """
    begun = _begin(comm, durable.directory_of(root), items, step, keep)
    share = {name: items[name] for name in begun.names}
    final = _finish(comm, begun, lambda: _write(begun, comm.rank, share))
    if comm.rank == 0:
        _prune(final, keep)
    return final


class CheckpointWriter:
    """Write checkpoints in the background, at most one at a time.

    On every rank, a thread writes the files; it never communicates. The copies of the rank's items
    stay in host memory as buffers for the next checkpoint.
    """

    def __init__(self, comm: Comm, root: str | Path, keep: int = 2) -> None:
        self.comm, self.root, self.keep = comm, durable.directory_of(root), keep
        self._thread = ThreadPoolExecutor(1, "mpikfac-checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._begun: _Begun | None = None
        self._shard: Future[dict[str, Any] | None] = Future()

    @property
    def pending(self) -> bool:
        """Return whether a checkpoint is begun but not yet committed; the same on all ranks."""
        return self._begun is not None

    @property
    def written(self) -> bool:
        """Return whether this rank's shard of the pending checkpoint has been written.

        The result is also true if writing failed.
        """
        return self.pending and self._shard.done()

    def begin(self, items: Mapping[str, Value], step: int) -> None:
        """Begin to save a checkpoint in the background; items can change once `begin` returns.

        A pending checkpoint is committed first.

        Collective over: comm.

        Raises:
            ValueError: `root` is not a path, `step` is negative or `keep` is below 1.
            UserError: see `save_checkpoint`; or the pending checkpoint failed, and no new one was
                begun.
        """
        self.commit()
        begun = _begin(self.comm, self.root, items, step, self.keep)
        self._begun = begun
        try:
            share = self._copied({name: items[name] for name in begun.names})
            self._shard = self._thread.submit(_write, begun, self.comm.rank, share)
        except Exception as error:  # such as a lack of memory, which `commit` reports to all ranks
            self._shard = Future()
            self._shard.set_exception(error)

    def commit(self) -> Path | None:
        """Wait for all ranks' shards, and return the checkpoint's path; None if none is pending.

        Collective over: comm.

        Raises:
            UserError: writing failed on some rank; the checkpoint's files are removed.
        """
        if self._begun is None:
            return None
        begun, self._begun = self._begun, None
        final = _finish(self.comm, begun, self._shard.result)
        if self.comm.rank == 0:
            self._thread.submit(_prune, final, self.keep)
        return final

    def abandon(self) -> None:
        """Wait until this rank's shard is written, and discard the pending checkpoint.

        Used in runs that have lost ranks, whose shards will never be complete.

        Collective over: none.
        """
        if self._begun is not None:
            self._begun = None
            wait([self._shard])

    def close(self) -> None:
        """Wait until older checkpoints are deleted, and end the thread; nothing can be saved later.

        Collective over: none.
        """
        self._thread.shutdown()

    def _copied(self, items: Mapping[str, Value]) -> dict[str, Value]:
        """Return the items, with tensors copied to the host into the last checkpoint's buffers."""
        buffers, self._copies = self._copies, {}
        for name, value in items.items():
            if isinstance(value, Tensor):
                self._copies[name] = _to_host(value.detach(), buffers.get(name))
        if any(isinstance(value, Tensor) and not value.is_cpu for value in items.values()):
            torch.accelerator.synchronize()
        return {**items, **self._copies}


def load_checkpoint(comm: Comm, path: str | Path) -> Checkpoint:
    """Return a checkpoint with the items of all ranks that wrote it, each read on first access.

    Any number of ranks can read it. Only rank 0's path is used.

    Collective over: comm.

    Raises:
        UserError: `path` is not a complete checkpoint of this format, or the manifest is damaged.
    """
    checkpoint = None
    with together(comm, f"reading checkpoint {path}", untrusted=True):
        if comm.rank == 0:
            checkpoint = read_checkpoint(durable.directory_of(path))
    return cast(Checkpoint, comm.bcast(checkpoint))


def find_checkpoint(comm: Comm, root: str | Path, skip: Collection[str] = ()) -> Checkpoint | None:
    """Check the files, and return the newest undamaged checkpoint under `root`, or None.

    Everything named `step-<step>` counts as a checkpoint. A damaged checkpoint, including one
    without a manifest, is skipped with a warning, and so is a checkpoint if the last two starts
    from it committed no newer one. If all undamaged checkpoints are skipped, the newest of them is
    used nevertheless. Later checkpoints whose directories were renamed are reported.

    Args:
        skip: names of directories to leave out.

    Collective over: comm.

    Raises:
        UserError: all checkpoints are damaged, or ranks see different files.
    """
    named: list[Path] = []
    with together(comm, f"looking for checkpoints in {root}"):
        if comm.rank == 0:
            named = [
                path for path in durable.named(durable.directory_of(root)) if path.name not in skip
            ]
    paths = comm.bcast(named[::-1])
    _wait_for_files(comm, paths)
    skipped: list[str] = []
    tried: list[Checkpoint] = []
    for path in paths:
        try:
            checkpoint = load_checkpoint(comm, path)
            _check(comm, checkpoint)
        except UserError as error:
            skipped.append(str(error))
            continue
        starts = comm.bcast(starts_from(checkpoint) if comm.rank == 0 else None)
        if starts < TRIES:
            return _chosen(comm, checkpoint, skipped)
        skipped.append(f"{path}: the last {starts} starts from it committed no newer checkpoint")
        tried.append(checkpoint)
    if tried:
        return _chosen(comm, tried[0], skipped)
    if comm.rank == 0:
        tell_of_renamed(durable.directory_of(root), -1)
    if skipped:
        raise UserError(f"no checkpoint in {root} can be read: {'; '.join(skipped)}")
    return None


@dataclass
class _Begun:
    """Describe a checkpoint that is being written to its temporary directory."""

    final: Path
    step: int
    names: list[str]  # the items that this rank writes
    sums: dict[str, int]  # checksums of items that other ranks also hold
    space: str
    held: list[dict[str, dict[str, Any]]]  # only rank 0 knows `held` and `shares`
    shares: list[list[str]]

    @property
    def doing(self) -> str:
        return f"writing checkpoint {self.final}"


def _begin(comm: Comm, root: Path, items: Mapping[str, Value], step: int, keep: int) -> _Begun:
    if not isinstance(step, SupportsIndex) or step < 0 or keep < 1:
        raise ValueError(f"step={step} and keep={keep} must be integers, >= 0 and >= 1")
    step = operator.index(step)  # JSON cannot contain NumPy integers
    agree(comm, {"root": str(root), "step": step, "keep": keep})
    items = {name: value for name, value in items.items() if name != PARAM_GROUPS}
    begun = _Begun(root / f"step-{step:09d}", step, [], {}, "", [], [])
    with together(comm, begun.doing):
        described = {name: describe(name, value) for name, value in items.items()}
    begun.held = comm.gather(described) or []
    shared: set[str] = set()
    with together(comm, begun.doing):
        if comm.rank == 0:
            begun.shares = _assign(begun.held)
            counts = Counter(name for described in begun.held for name in described)
            shared = {name for name, count in counts.items() if count > 1}
            begun.space = _space(begun)
            with _naming(begun.space):
                durable.begin(begun.final)
    begun.names = comm.scatter(begun.shares)
    shared, begun.space = comm.bcast((shared, begun.space))
    begun.sums = {name: checksum(value) for name, value in items.items() if name in shared}
    return begun


def _finish(comm: Comm, begun: _Begun, write: Callable[[], dict[str, Any] | None]) -> Path:
    """Commit the checkpoint as soon as `write` is done on all ranks; return its final path."""
    final = begun.final
    try:
        with together(comm, begun.doing), _naming(begun.space):
            shard = _written(write)
        written = comm.gather((shard, begun.sums)) or []
        with together(comm, begun.doing), _naming(begun.space):
            if comm.rank == 0:
                shards, sums = zip(*written)
                _compare(sums)
                manifest = make_manifest(begun.step, begun.held, begun.shares, shards)
                durable.commit(final, manifest)
    except UserError:
        if comm.rank == 0:
            durable.abandon(final)
        raise
    return final


def _prune(final: Path, keep: int) -> None:
    """Delete older checkpoints; if that fails, only warn, because the new one is complete."""
    try:
        SOUND[final] = _signature(read_checkpoint(final))
        durable.prune(final, keep, _is_sound)
    except (OSError, UserError) as error:
        log.warning("checkpoints older than %s are not deleted: %s", final, error)
    for path in [path for path in SOUND if not path.exists()]:
        del SOUND[path]


def _is_sound(path: Path) -> bool:
    """Return whether a checkpoint can be read; files checked before are not read again."""
    try:
        checkpoint = read_checkpoint(path)
        signature = _signature(checkpoint)
        if SOUND.get(path) != signature:
            for file in checkpoint.shards:
                checkpoint.check(file)
            SOUND[path] = signature
    except (OSError, UserError) as error:
        log.warning("%s; it does not count as one of the checkpoints to keep", error)
        return False
    return True


def _signature(checkpoint: Checkpoint) -> object:
    """Return values that change if a file of the checkpoint changes."""
    stats = {file: (checkpoint.path / file).lstat() for file in checkpoint.shards}
    times = [(file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()]
    return checkpoint.digest, times


def _write(begun: _Begun, rank: int, items: Mapping[str, Value]) -> dict[str, Any] | None:
    return write_shard(durable.partial(begun.final) / f"shard-{rank}.h5", items) if items else None


def _to_host(value: Tensor, buffer: Tensor | None) -> Tensor:
    """Copy a value to host memory, into `buffer` if it matches; a GPU may finish copying later."""
    if buffer is None or (buffer.dtype, buffer.shape) != (value.dtype, value.shape):
        buffer = torch.empty_like(value, device="cpu", pin_memory=not value.is_cpu)
    return buffer.copy_(value, non_blocking=True)


def _space(begun: _Begun) -> str:
    needed = sum(
        described[name]["bytes"]
        for described, names in zip(begun.held, begun.shares)
        for name in names
    )
    return f"{needed:,} bytes needed, {durable.free(begun.final):,} free"


@contextmanager
def _naming(space: str) -> Iterator[None]:
    """Add the numbers of bytes needed and free to an `OSError` raised by the body."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{error}; {space}") from error


def _assign(held: Sequence[Mapping[str, dict[str, Any]]]) -> list[list[str]]:
    """Assign each item to the least loaded of the ranks that hold it; return names by rank.

    Items that only one rank holds are assigned first; of the other items, the largest come first.
    """
    holders: dict[str, list[int]] = {}
    for rank, described in enumerate(held):
        for name, form in described.items():
            ranks = holders.setdefault(name, [])
            if ranks and form != (first := held[ranks[0]][name]):
                raise RanksDifferError(
                    f"item {name!r} is {reprlib.repr(first)} on rank {ranks[0]} "
                    f"but {reprlib.repr(form)} on rank {rank}"
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


def _written(write: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return what `write` returns; turn every error into one that `together` reports.

    Raises:
        UserError: `write` raised an error that `together` does not report, such as MemoryError.
    """
    try:
        return write()
    except (OSError, ValueError, UserError):
        raise
    except Exception as error:
        raise UserError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _compare(sums: Sequence[Mapping[str, int]]) -> None:
    """Raise RanksDifferError if the checksum of an item differs between ranks."""
    first: dict[str, tuple[int, int]] = {}
    for rank, checksums in enumerate(sums):
        for name, value in checksums.items():
            holder, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise RanksDifferError(
                    f"item {name!r} has different values on rank {rank} and rank {holder}; change "
                    f"weights and buffers identically on all ranks, or copy rank 0's with "
                    f"mpikfac.comm.broadcast(comm, tensors)"
                )


def _wait_for_files(comm: Comm, checkpoints: Sequence[Path]) -> None:
    """Wait until all ranks see the files that rank 0 sees; network file systems can lag."""
    seen: dict[str, int] = {}
    with together(comm, "looking for checkpoints"):
        if comm.rank == 0:
            seen = _files(checkpoints)
    seen = comm.bcast(seen)
    with together(comm, "looking for checkpoints"):
        for _ in looks(PATIENCE, 0.1):
            if not (missing := dict(seen.items() - _files(checkpoints).items())):
                return
        raise UserError(
            f"rank {comm.rank} does not see {next(iter(missing))} as rank 0 does: ranks "
            f"see different directories; use one on a file system that all ranks share"
        )


def _files(directories: Sequence[Path]) -> dict[str, int]:
    """Return the sizes of the directories' files in bytes, by path."""
    return {
        str(file): file.lstat().st_size
        for directory in directories
        if directory.is_dir()
        for file in directory.iterdir()
    }


def _check(comm: Comm, checkpoint: Checkpoint) -> None:
    """Check all files, each on one rank; raise UserError on all ranks if any is damaged."""
    with together(comm, f"reading checkpoint {checkpoint.path}", untrusted=True):
        for shard in sorted(checkpoint.shards)[comm.rank :: comm.size]:
            checkpoint.check(shard)


def _chosen(comm: Comm, checkpoint: Checkpoint, skipped: Sequence[str]) -> Checkpoint:
    if comm.rank == 0:
        for reason in skipped:
            log.warning("%s; continuing from %s", reason, checkpoint.path)
        tell_of_renamed(checkpoint.path.parent, checkpoint.step)
    return checkpoint
