"""Write an artifact description: hardware, versions, commands, expected and actual values."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from mpikfac import files
from mpikfac_apps import place
from mpikfac_apps.lab.pages import rendered
from mpikfac_apps.lab.reproduce.entry import Entry, Row


class Reproduced(NamedTuple):
    """An entry and its rows.

    Attributes:
        refusal: why the rows could not be computed here; "" if they could.
    """

    entry: Entry
    rows: Sequence[Row]
    refusal: str = ""


KINDS = ("md", "html")


def write(directory: Path, results: Sequence[Reproduced]) -> list[Path]:
    """Write artifact.md and artifact.html; return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in KINDS:
        text = rendered(
            Path(__file__).with_name(f"artifact.{kind}"),
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            hardware=list(hardware()),
            software=list(software()),
            results=results,
            facts=facts,
            head=head,
            cells=cells,
        )
        paths.append(directory / f"artifact.{kind}")
        files.write_text(paths[-1], text)
    return paths


def facts(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions of what is needed to reproduce a result."""
    yield "paper", entry.paper
    yield "source", entry.source
    yield "data", entry.data
    yield "command", f"{entry.command} (about {entry.seconds:,.0f} s on two cores)"
    yield "tolerance", tolerance(entry)


def head(entry: Entry) -> tuple[str, ...]:
    """Return the heading of a result's table."""
    return "what", "where", entry.expected, entry.found, "off", "verdict"


def cells(entry: Entry, row: Row) -> tuple[str, ...]:
    """Return the cells of a row: what, where, expected, found, deviation and verdict."""
    verdict = entry.verdict(row) or "agrees"
    numbers = digits(row.published), digits(row.found), deviation(entry, row)
    return (row.what, row.where, *numbers, verdict)


def deviation(entry: Entry, row: Row) -> str:
    """Format the deviation of a row in per cent, or in points."""
    off = entry.off(row)
    return f"{off:+z.2f} points" if entry.points else f"{100 * off:+z.0f} %"


def digits(number: float) -> str:
    """Format a number with three digits."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def tolerance(entry: Entry) -> str:
    """Format a tolerance in per cent, or in points."""
    number = entry.tolerance
    return f"{number:.3g} points" if entry.points else f"{100 * number:.3g} %"


def hardware() -> Iterator[tuple[str, str]]:
    """Yield the names and values of the machine's components."""
    yield "processor", _processor()
    yield "cores of this process", str(len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    yield "GPUs", ", ".join(names) or "none"


def _processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in files.read_text("/proc/cpuinfo", files.LIMIT).splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def software() -> Iterator[tuple[str, str]]:
    """Yield names and versions of the software."""
    yield "system", platform.platform()
    yield "Python", platform.python_version()
    for name in place.PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    yield "commit", place.commit() or "unknown"
