"""What programs share: parser, options, tables, and the checkpoint that a path means."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
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
    with mpikfac.together(comm, "options"):
        if comm.rank == 0:
            try:
                options = parse()
            except SystemExit as leave:
                if leave.code:
                    raise
    return comm.bcast(options)  # type: ignore[no-any-return]


def show(sections: Sequence[Sequence[str]]) -> None:
    """Prints sections of lines with an empty line between them."""
    try:
        print("\n\n".join("\n".join(section) for section in sections), flush=True)
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows with aligned columns, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if index < left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def checkpoint_at(path: Path) -> Path:
    """The checkpoint's directory that a path means: itself, or the newest of a run.

    Raises:
        ValueError: there is none.
    """
    if (path / "manifest.json").exists():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (newest := mpikfac.latest_checkpoint(root)):
            return newest
    raise ValueError(f"{path} holds no complete checkpoint; give the directory of one or of a run")
