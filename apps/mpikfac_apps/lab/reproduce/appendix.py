"""Write an artifact description: hardware, versions, commands, expected and found numbers."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import jinja2
import torch

from mpikfac import files
from mpikfac_apps import place
from mpikfac_apps.lab.reproduce.entry import Entry, Row

Result = tuple[Entry, Sequence[Row]]
KINDS = ("md", "html")


def write(directory: Path, results: Sequence[Result]) -> list[Path]:
    """Write artifact.md and artifact.html; return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in KINDS:
        environment = jinja2.Environment(
            autoescape=kind == "html",
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        template = Path(__file__).with_name(f"artifact.{kind}").read_text()
        text = environment.from_string(template).render(
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            hardware=list(hardware()),
            software=list(software()),
            results=[(entry, list(facts(entry)), head(entry), rows) for entry, rows in results],
            cells=cells,
        )
        paths.append(directory / f"artifact.{kind}")
        files.write_text(paths[-1], text)
    return paths


def facts(entry: Entry) -> Iterator[tuple[str, str]]:
    """Yield names and texts of what reproducing a result takes."""
    yield "paper", entry.paper
    yield "source", entry.source
    yield "data", entry.data
    yield "command", f"{entry.command} (about {entry.seconds:,.0f} s on two cores)"
    yield "tolerance", percentage(entry.tolerance)


def head(entry: Entry) -> tuple[str, ...]:
    """Return the heading of a result's table."""
    return "what", "where", "published", entry.found, "off", "verdict"


def cells(entry: Entry, row: Row) -> tuple[str, ...]:
    """Return the texts of a row: what, where, published, found, deviation and verdict."""
    verdict = entry.verdict(row) or "agrees"
    return (row.what, row.where, digits(row.published), digits(row.found), deviation(row), verdict)


def deviation(row: Row) -> str:
    """Format the deviation of a row in per cent."""
    return f"{100 * row.off:+z.0f} %"


def digits(number: float) -> str:
    """Format a number with three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def percentage(share: float) -> str:
    """Format a tolerance in per cent."""
    return f"{100 * share:.3g} %"


def hardware() -> Iterator[tuple[str, str]]:
    """Yield names and values of the machine's parts."""
    yield "processor", _processor()
    yield "cores of this process", str(len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    yield "GPUs", ", ".join(names) or "none"


def _processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
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
