"""Crash loops: how many starts in a row went on from a checkpoint without committing a newer one.

    root/starts.json    [{"step": 120, "digest": "...", "starts": 2}]

A checkpoint after which a run dies again and again is not tried a third time while there is
another one. All functions are for one rank.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from mpikfac.checkpoint import durable
from mpikfac.checkpoint.manifest import Checkpoint

RECORD = "starts.json"
TRIES = 2
FIELDS = ("step", "digest", "starts")

log = logging.getLogger("mpikfac")


def note_start(checkpoint: Checkpoint) -> None:
    """Counts a start that goes on from the checkpoint; call it on one rank.

    Starts from older ones are forgotten: one of them has led to this checkpoint. A disk on which
    nothing can be written does not stop the run.

    Collective over: none.
    """
    root = checkpoint.path.parent
    started = [start for start in _read(root) if start[0] > checkpoint.step]
    started.append((checkpoint.step, checkpoint.digest, starts_from(checkpoint) + 1))
    record = [dict(zip(FIELDS, start)) for start in started]
    try:
        durable.replace(root / RECORD, json.dumps(record).encode())
    except OSError as error:
        log.warning("this start is not counted: %s", error)


def note_end(root: str | Path) -> None:
    """Forgets all starts, as the run came to an orderly end; call it on one rank.

    Collective over: none.
    """
    (Path(root) / RECORD).unlink(missing_ok=True)


def starts_from(checkpoint: Checkpoint) -> int:
    """How many starts in a row went on from the checkpoint and committed no newer one."""
    counts = {digest: starts for _, digest, starts in _read(checkpoint.path.parent)}
    return counts.get(checkpoint.digest, 0)


def _read(root: Path) -> list[tuple[int, str, int]]:
    try:
        record = json.loads((root / RECORD).read_bytes())
        return [
            (int(start["step"]), str(start["digest"]), int(start["starts"])) for start in record
        ]
    except (OSError, KeyError, TypeError, ValueError):  # none yet, or damaged: count from now on
        return []
