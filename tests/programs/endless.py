"""Writes checkpoints one after the other: endless.py ROOT save|write FIRST VICTIM SECONDS.

The rank VICTIM is killed SECONDS after the first step; rank 0 prints the written steps.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mpikfac


def state(step: int, rank: int) -> dict[str, Any]:
    """Return a rank's items at a step: an item of the rank alone, and items of all ranks."""
    return {
        f"factors/{rank}": torch.full((200_000,), float(step)),
        "model/weight": torch.full((300_000,), -float(step)),
        "trainer/steps": step,
    }


def save(comm: Any, root: Path, first: int, acknowledge: Callable[[int], None]) -> None:
    """Save every step from `first` on; acknowledge saved steps."""
    for step in range(first, 10**6):
        mpikfac.save_checkpoint(comm, root, state(step, comm.rank), step)
        acknowledge(step)


def write(comm: Any, root: Path, first: int, acknowledge: Callable[[int], None]) -> None:
    """Save in the background; the tensors change in place, as in training."""
    writer = mpikfac.CheckpointWriter(comm, root)
    items = state(first, comm.rank)
    for step in range(first, 10**6):
        for name, value in state(step, comm.rank).items():
            items[name] = items[name].copy_(value) if isinstance(value, torch.Tensor) else value
        writer.begin(items, step)
        if step > first:
            acknowledge(step - 1)  # begin() has committed the step before


def main(root: str, body: str, first: str, victim: str, seconds: str) -> None:
    """Run the program."""
    comm = mpikfac.world()

    def acknowledge(step: int) -> None:
        if comm.rank == int(victim) and step == int(first):
            # the kernel ends the rank, as by kill -9
            signal.setitimer(signal.ITIMER_REAL, float(seconds))
        if comm.rank == 0:
            print(step, flush=True)

    {"save": save, "write": write}[body](comm, Path(root), int(first), acknowledge)


if __name__ == "__main__":
    main(*sys.argv[1:])
