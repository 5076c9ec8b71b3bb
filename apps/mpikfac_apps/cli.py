"""Command lines: parsers, options on all ranks, and the checkpoint that a path means."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import mpikfac

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


class Strict(Parser):
    """A parser for one rank of many, which tells the others what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def read_options(comm: Any, parse: Callable[[], Options]) -> Options | None:
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
    return comm.bcast(options)  # type: ignore[no-any-return]


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
