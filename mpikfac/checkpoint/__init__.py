"""Write and read checkpoints, complete or absent: HDF5 shards, a manifest, restarts."""

from __future__ import annotations

from mpikfac.checkpoint.checkpoint import (
    CheckpointWriter,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from mpikfac.checkpoint.manifest import Checkpoint, latest_checkpoint, read_checkpoint
from mpikfac.checkpoint.restarts import note_end, note_start

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "find_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "note_end",
    "note_start",
    "read_checkpoint",
    "save_checkpoint",
]
