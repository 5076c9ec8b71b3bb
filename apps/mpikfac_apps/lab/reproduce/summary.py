"""Count the verdicts on reproduced results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpikfac_apps.lab.reproduce.entry import ERRORS, Entry, Row, Verdict
from mpikfac_apps.text import number


class Reproduced(NamedTuple):
    """An entry of `mpikfac reproduce`, and the rows computed for it.

    Attributes:
        seconds: the time taken to compute the rows.
        refusal: why the rows could not be computed here; "" if they could.
    """

    entry: Entry
    rows: Sequence[Row]
    seconds: float = 0.0
    refusal: str = ""


GROUPS: dict[str, tuple[Verdict, ...]] = {
    "agree": ("agrees", "record agrees"),
    "fitted": ("fitted",),
    "miss": ("miss",),
    "outside": ERRORS,
}
HEAD = "experiment", "compares", "kind", "rows", *GROUPS, "not run", "seconds"


def counts(results: Sequence[Reproduced]) -> Counter[str]:
    """Return the number of rows, of rows in each of `GROUPS`, and of results that were not run."""
    verdicts = Counter(entry.verdict(row) for entry, rows, *_ in results for row in rows)
    groups = {name: sum(verdicts[one] for one in group) for name, group in GROUPS.items()}
    refused = sum(bool(result.refusal) for result in results)
    return Counter({"rows": verdicts.total(), **groups, "not run": refused})


def exit_code(results: Sequence[Reproduced]) -> int:
    """Return 1 if a value is not as expected or a result was not computed, otherwise 0."""
    of = counts(results)
    return int(of["outside"] + of["not run"] > 0)


def line(results: Sequence[Reproduced]) -> str:
    """Return a line with all counts, the exit code and the total time."""
    of, experiments = counts(results), number(len(results), "experiment")
    rows = ", ".join(f"{of[name]} {name}" for name in GROUPS)
    return (
        f"{experiments}, {of['not run']} not run; {number(of['rows'], 'row')}: {rows}; "
        f"exit code {exit_code(results)}; {seconds(results)} s"
    )


def table(results: Sequence[Reproduced]) -> Iterator[tuple[str, ...]]:
    """Yield the table cells of each result, followed by those of the totals."""
    for result in results:
        entry = result.entry
        yield (entry.name, entry.about, entry.found, *numbers([result]))
    yield ("all", "", "", *numbers(results))


def numbers(results: Sequence[Reproduced]) -> tuple[str, ...]:
    """Return the counts and the time of results, in the order of `HEAD`."""
    return (*map(str, counts(results).values()), seconds(results))


def seconds(results: Sequence[Reproduced]) -> str:
    """Format the total time of results in seconds; the minimum is 1."""
    return f"{max(1, sum(result.seconds for result in results)):,.0f}"
