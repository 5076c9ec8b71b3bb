"""What programs share: wrong input, options on all ranks, the checkpoint that a path means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import mpikfac

Options = TypeVar("Options")


def run(program: str, work: Callable[[], int]) -> int:
    """Return the exit code of a program's work, or 2 after one line about wrong input."""
    try:
        return work()
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def read_options(comm: mpikfac.comm.Comm, parse: Callable[[], Options]) -> Options | None:
    """What rank 0 parses, on every rank; None if it was asked for help only.

    Collective over: comm.

    Raises:
        UserError: what `parse` raises as ValueError.
    """
    options = None
    with mpikfac.comm.together(comm, "options"):
        if comm.rank == 0:
            try:
                options = parse()
            except SystemExit as leave:
                if leave.code:
                    raise
    return comm.bcast(options)


def checkpoint_at(path: Path) -> Path:
    """The checkpoint's directory that a path means: itself, or the newest of a run.

    Raises:
        ValueError: there is none.
    """
    if (path / "manifest.json").exists():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (newest := mpikfac.checkpoint.latest_checkpoint(root)):
            return newest
    raise ValueError(f"{path} holds no complete checkpoint; give the directory of one or of a run")
