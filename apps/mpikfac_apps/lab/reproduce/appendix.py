"""Write an artifact description: hardware, versions, commands, expected and actual values."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from mpikfac import files
from mpikfac_apps import place
from mpikfac_apps.lab.pages import rendered
from mpikfac_apps.lab.reproduce import summary
from mpikfac_apps.lab.reproduce.entry import VERDICTS, Entry, Row
from mpikfac_apps.lab.reproduce.summary import Reproduced

KINDS = ("md", "html")
EXAMPLE = {
    **{"what": "s of a message", "where": "4 ranks", "published": "0.1", "predicted": "0.13"},
    **{"off": "+30 %", "verdict": "outside the tolerance"},
}
"""A made-up row with an error, keyed by column."""
VARIABLES = ("OMP_", "OMPI_", "MKL_", "MPI4PY_", "MPIRUN")
"""Prefixes of environment variables that can affect a result."""
FACTS = ("cpu family", "model", "cpu MHz")
"""The keys of facts about a processor in /proc/cpuinfo."""


def write(
    directory: Path, results: Sequence[Reproduced], machine: Sequence[tuple[str, str]]
) -> list[Path]:
    """Write artifact.md and artifact.html, with facts about the machine; return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in KINDS:
        text = rendered(
            Path(__file__).with_name(f"artifact.{kind}"),
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            hardware=machine,
            software=list(software()),
            commands=list(installation()),
            results=results,
            summary=summary,
            verdicts=VERDICTS,
            example=EXAMPLE,
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
    yield "kind", entry.kind
    yield "data", entry.data
    command = f"mpikfac reproduce {entry.name}"
    yield "command", f"{command} (about {entry.seconds:,.0f} s on two idle cores)"
    if entry.anew:
        yield "new measurements", entry.anew
    yield "tolerance", f"{tolerance(entry)}: {entry.why}"


def head(entry: Entry) -> tuple[str, ...]:
    """Return the column headings of an entry's table of results."""
    return "what", "where", entry.expected, entry.found, "off", "verdict"


def cells(entry: Entry, row: Row) -> tuple[str, ...]:
    """Return the cells of a result's row: what, where, expected, found, deviation and verdict."""
    ends = row.published, *(() if row.most is None else (row.most,))
    expected = " to ".join(digits(entry, end) for end in ends)
    numbers = expected, digits(entry, row.found), deviation(entry, row)
    return (row.what, row.where, *numbers, entry.verdict(row))


def deviation(entry: Entry, row: Row) -> str:
    """Format the deviation of a row from its expected value, in per cent or in points."""
    off, decimals = entry.off(row), places(entry)
    return f"{off:+z.{decimals}f} points" if entry.points else f"{100 * off:+z.{decimals}f} %"


def digits(entry: Entry, number: float) -> str:
    """Format a number with enough decimals to show deviations as small as the tolerance."""
    decimals = places(entry)
    if not entry.points:
        decimals = max(0, decimals + 2 - exponent(number))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def places(entry: Entry) -> int:
    """Return the number of decimals with which an entry's deviations are shown.

    This is one decimal more than the leading digit of the tolerance needs; 0 if the tolerance is
    10 or more.
    """
    return max(0, 1 - exponent(entry.tolerance * (1 if entry.points else 100)))


def exponent(number: float) -> int:
    """Return the exponent of a number in scientific notation; 0 if it is not finite."""
    return int(f"{number:e}".partition("e")[2] or 0)


def tolerance(entry: Entry) -> str:
    """Format an entry's tolerance in per cent, or in points."""
    number = entry.tolerance
    return f"{number:.3g} points" if entry.points else f"{100 * number:.3g} %"


def hardware() -> Iterator[tuple[str, str]]:
    """Yield the names and values of the machine's components, and its load."""
    yield "processor", _processor()
    yield "cores of this process", str(len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    yield "GPUs", ", ".join(names) or "none"
    yield "load at the start", f"{os.getloadavg()[0]:.1f} processes, the mean of a minute"


def _processor() -> str:
    """Return the name, family, model and frequency of the processor."""
    with suppress(OSError):
        lines = files.read_text("/proc/cpuinfo", files.LIMIT).splitlines()
        values = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        if "model name" in values:
            facts = [f"{key} {values[key]}" for key in FACTS if key in values]
            virtual = ["virtual"] * ("hypervisor" in values.get("flags", "").split())
            return ", ".join([values["model name"], *facts, *virtual])
    return platform.machine()


def software() -> Iterator[tuple[str, str]]:
    """Yield names and versions of the software."""
    with suppress(OSError):
        yield "distribution", platform.freedesktop_os_release()["PRETTY_NAME"]
    yield "system", platform.platform()
    yield "Python", platform.python_version()
    for name in place.PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    yield "commit", place.commit() or "unknown"
    values = (f"{key}={os.environ[key]}" for key in sorted(os.environ) if key.startswith(VARIABLES))
    yield "environment variables", ", ".join(values) or "none"


def installation() -> Iterator[str]:
    """Yield the commands that install the project and write the appendix."""
    commit = (place.commit() or "COMMIT").removesuffix("-dirty")
    yield "git clone REPOSITORY mpikfac"
    yield "cd mpikfac"
    yield f"git checkout {commit}"
    yield "python3 -m venv .venv"
    yield "source .venv/bin/activate"
    yield 'pip install -c constraints.txt -e ".[apps,mpi]"'
    yield "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # only as root"
    yield "mpikfac reproduce --appendix DIR"
