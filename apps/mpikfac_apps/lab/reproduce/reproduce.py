"""List published results, or compare one with what is predicted or measured here.

mpikfac reproduce
mpikfac reproduce sc20-steps
mpikfac reproduce --appendix DIR
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from mpikfac_apps import cli
from mpikfac_apps.lab.reproduce import appendix, summary
from mpikfac_apps.lab.reproduce.entry import Entry
from mpikfac_apps.lab.reproduce.options import REPRODUCE, ReproduceOptions
from mpikfac_apps.lab.reproduce.registry import ENTRIES
from mpikfac_apps.lab.reproduce.summary import Reproduced
from mpikfac_apps.text import listed, show, table

WIDTH = 96


def main(argv: Sequence[str] | None = None) -> int:
    """List or compare published results; return 0, 1 for an unexpected value, 2 for bad options."""
    return cli.run(REPRODUCE.program, lambda: reproduce(REPRODUCE.read(argv)))


def reproduce(options: ReproduceOptions) -> int:
    """List all results, print one, or write the appendix; return 1 if a value is wrong, else 0.

    Raises:
        ValueError: no result is named `options.name`, or it cannot be reproduced here.
        OSError: a file cannot be written.
    """
    if options.name is None and options.appendix is None:
        show([listing()])
        return 0
    entries = [chosen(options.name)] if options.name else list(ENTRIES.values())
    results, machine = [], list(appendix.hardware())
    for entry in entries:
        results.append(found(entry, alone=len(entries) == 1))
        show([section(results[-1])])
    if options.appendix:
        paths = appendix.write(options.appendix, results, machine)
        show([[f"wrote {listed(map(str, paths))}"]])
    show([[summary.line(results)]])
    return summary.exit_code(results)


def found(entry: Entry, alone: bool) -> Reproduced:
    """Return the rows of an entry, or the reason why they cannot be computed here.

    Raises:
        ValueError: the rows cannot be computed, and `alone` is set.
        OSError: a file is missing, and `alone` is set.
    """
    start = time.monotonic()
    try:
        return Reproduced(entry, list(entry.rows()), time.monotonic() - start)
    except (OSError, ValueError) as error:
        if alone:
            raise
        return Reproduced(entry, [], time.monotonic() - start, str(error))


def chosen(name: str) -> Entry:
    """Return the entry with a name.

    Raises:
        ValueError: there is no such entry.
    """
    if name not in ENTRIES:
        near = get_close_matches(name, ENTRIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"try {listed(ENTRIES)}"
        raise ValueError(f"{name!r} is unknown; {hint}")
    return ENTRIES[name]


def listing() -> list[str]:
    """Return lines with a table of all published results."""
    head = "name", "paper", "compared", "found", "tolerance", "seconds"
    rows = [
        (
            entry.name,
            textwrap.shorten(entry.paper, 24, placeholder=" ..."),
            entry.about,
            entry.found,
            appendix.tolerance(entry),
            f"{entry.seconds:,.0f}",
        )
        for entry in ENTRIES.values()
    ]
    return [
        *table([head, *rows], left=4),
        "",
        "mpikfac reproduce NAME prints the published values and those found here. Recorded values",
        "come from commands that take hours; the output names these commands.",
    ]


def section(result: Reproduced) -> list[str]:
    """Return lines about a result: its source, data and command, and the values."""
    entry, rows, seconds, refusal = result
    facts = [f"{name}: {text}" for name, text in appendix.facts(entry)]
    lines = wrapped(facts)
    if refusal:
        return [f"{entry.name}: {entry.about}", *lines, f"could not be run: {refusal}"]
    cells = [appendix.head(entry), *(appendix.cells(entry, row) for row in rows)]
    misses = dict.fromkeys(f"miss: {row.miss}" for row in rows if row.miss)
    return [
        f"{entry.name}: {entry.about}",
        *lines,
        *table(cells, left=2),
        *wrapped(misses),
        f"took {seconds:.1f} s",
    ]


def wrapped(texts: Iterable[str]) -> list[str]:
    """Wrap each text into lines of at most WIDTH characters."""
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line for text in texts for line in wrap.wrap(text)]
