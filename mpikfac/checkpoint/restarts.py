"""Detect crash loops: count the starts from a checkpoint until one commits a newer checkpoint.

    root/starts.json    [{"step": 120, "digest": "...", "starts": 2}]

If two starts from a checkpoint have failed, a third start uses another checkpoint if possible. Call
all functions on a single rank.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from mpikfac import files
from mpikfac.checkpoint import durable
from mpikfac.checkpoint.manifest import UNREADABLE, Checkpoint

RECORD = "starts.json"
TRIES = 2
FIELDS = ("step", "digest", "starts")

log = logging.getLogger("mpikfac")


def note_start(checkpoint: Checkpoint) -> None:
    """Count a start that resumes from the checkpoint; call this on a single rank.

    The counts for older checkpoints are dropped, because this checkpoint shows that a run that
    started from one of them made progress. A full or read-only disk does not stop the run.

    Collective over: none.
    """
    root = checkpoint.path.parent
    try:
        starts = _read(root)
    except UNREADABLE as error:
        log.warning("starts are counted from 0 again: %s cannot be read: %s", root / RECORD, error)
        starts = []
    started = [start for start in starts if start[0] > checkpoint.step]
    started.append((checkpoint.step, checkpoint.digest, starts_from(checkpoint) + 1))
    record = [dict(zip(FIELDS, start)) for start in started]
    try:
        durable.replace(root / RECORD, json.dumps(record).encode())
    except OSError as error:
        log.warning("this start is not counted: %s", error)


def note_end(root: str | Path) -> None:
    """Drop all counts, because the run ended normally; call this on a single rank.

    Collective over: none.
    """
    try:
        (Path(root) / RECORD).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the start counts could not be reset: %s", error)


def starts_from(checkpoint: Checkpoint) -> int:
    """Return how many consecutive starts resumed from the checkpoint and committed no newer one.

    If `starts.json` is damaged, return 0.
    """
    with suppress(*UNREADABLE):
        counts = {digest: starts for _, digest, starts in _read(checkpoint.path.parent)}
        return counts.get(checkpoint.digest, 0)
    return 0


def _read(root: Path) -> list[tuple[int, str, int]]:
    try:
        record = files.read_json(root / RECORD, files.SMALL)
    except FileNotFoundError:  # no record yet
        return []
    return [(int(start["step"]), str(start["digest"]), int(start["starts"])) for start in record]
