"""Format numbers, names and tables as text."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from mpikfac import files

MIB = 2**20
MOST = 2**20
"""The maximum number of ranks, images or pixels in a row that a program accepts."""
NONE = "\N{EN DASH}"


def is_own(name: str) -> bool:
    """Return whether a name refers to an object in a file, such as FILE.py:CLASS."""
    return ".py:" in name


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 to `MOST` from a string such as "16,64".

    Raises:
        ValueError: a part of the string is not such a number.
    """
    for part in text.split(","):
        if not part.isdecimal() or not 1 <= int(part) <= MOST:
            raise ValueError(f"{part or 'nothing'} must be a whole number from 1 to {MOST:,}")
    return tuple(map(int, text.split(",")))


def mib(size: float) -> str:
    """Format bytes in MiB, with two decimals."""
    return "<0.01" if 0 < size < MIB / 100 else f"{size / MIB:.2f}"


def number(of: int, what: str) -> str:
    """Format a count and its noun, such as "1 rank" or "2 ranks"."""
    return f"{of} {what}" if of == 1 else f"{of} {what}s"


def in_lines(words: Iterable[str], per_line: int = 4) -> list[str]:
    """Arrange words in aligned columns, `per_line` words per line, and return the lines."""
    cells = list(words)
    width = max(map(len, cells)) + 3
    lines = (cells[start : start + per_line] for start in range(0, len(cells), per_line))
    return ["  " + "".join(f"{cell:<{width}}" for cell in line).rstrip() for line in lines]


def share(target: float) -> float:
    """Return `target` as a fraction (0 to 1); a value above 1 is a percentage."""
    return target / 100 if target > 1 else target


def percent(share: float | None, digits: int = 1) -> str:
    """Format a fraction (0 to 1) as a percentage."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def measured(measure: str, value: float | None, digits: int = 2) -> str:
    """Format the metric "accuracy" (0 to 1) as a percentage, and any other metric as a number."""
    if measure == "accuracy" or value is None:
        return percent(value, digits)
    return f"{value:.4g}"


def key_of(measure: str) -> str:
    """Return the name of a metric, such as "bits per byte", with underscores, for use in keys."""
    return measure.replace(" ", "_")


def ms(seconds: float | None) -> str:
    """Format seconds as milliseconds, with at least three digits."""
    if seconds is None:
        return NONE
    milliseconds = 1e3 * seconds
    if seconds >= 0.1:
        return f"{milliseconds:,.0f}"
    return f"{milliseconds:,.1f}" if seconds >= 0.01 else f"{milliseconds:,.2f}"


def brief(seconds: float) -> str:
    """Format seconds with at least three digits."""
    if seconds >= 100:
        return f"{seconds:.0f}"
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"


def brief_mib(size: float) -> str:
    """Format bytes in MiB, with at least three digits."""
    if size == 0:
        return "0"
    return f"{size / MIB:,.0f}" if size >= 100 * MIB else f"{size / MIB:.3g}"


def listed(names: Iterable[str]) -> str:
    """Join names into a list, such as "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def show(sections: Sequence[Sequence[str]]) -> None:
    """Print sections of lines, separated by empty lines."""
    text = "\n\n".join("\n".join(map(files.printable, section)) for section in sections)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, for example `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines of aligned columns; the first `left` columns are left-aligned text."""
    text = tabulate(rows, tablefmt="plain", colalign=_sides(rows, left), disable_numparse=True)
    return [f"  {line}" for line in text.split("\n")]


def latex(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in LaTeX with the rules of booktabs; the first row is the heading."""
    heading, *lines = [[files.printable(text) for text in row] for row in rows]
    sides = _sides(rows, left=1)
    text = tabulate(
        lines, heading, tablefmt="latex_booktabs", colalign=sides, disable_numparse=True
    )
    text = text.replace("\N{PLUS-MINUS SIGN}", r"$\pm$").replace(NONE, "--")
    return f"% \\usepackage{{booktabs}}\n{text}\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as comma-separated text, with the keys in the first line."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _sides(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the alignment of each column."""
    return ["left"] * left + ["right"] * (len(rows[0]) - left)
