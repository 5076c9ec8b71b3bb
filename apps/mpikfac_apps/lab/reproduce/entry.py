"""An entry of `mpikfac reproduce`: a published result, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Row(NamedTuple):
    """A published value, and the value found here.

    Attributes:
        where: the network, ranks or machine.
        published: the expected value; see `Entry.expected`.
        miss: the reason why the values are known to differ by more than the tolerance; "" if they
            should agree.
    """

    what: str
    where: str
    published: float
    found: float
    miss: str = ""


@dataclass(frozen=True)
class Entry:
    """A published result.

    Attributes:
        about: what is compared.
        paper: the short name of the paper in docs/reference/references.md, after "method of" if the
            values are not the paper's.
        source: the table, figure or formula with the expected values.
        found: how `rows` finds its values. "recorded": in the results of `again`, which takes
            hours.
        tolerance: the largest deviation of a row without a `miss`.
        seconds: the time of `command` on two idle cores.
        rows: computes the rows, in less than a minute.
        data: the data set that the command reads.
        again: the command that repeats the recorded measurements.
        expected: the source of the expected values, as the title of their column.
        points: whether rows are percentages, whose deviation is a difference in points; otherwise,
            it is relative.
    """

    name: str
    about: str
    paper: str
    source: str
    found: Literal["predicted", "measured", "recorded"]
    tolerance: float
    seconds: float
    rows: Callable[[], Iterable[Row]]
    data: str = "none"
    again: str = ""
    expected: Literal["published", "by the formula", "by the rule", "simulated", "recorded"] = (
        "published"
    )
    points: bool = False

    @property
    def command(self) -> str:
        """The command that reproduces the values."""
        return self.again or f"mpikfac reproduce {self.name}"

    def off(self, row: Row) -> float:
        """Return the deviation of a row."""
        return row.found - row.published if self.points else row.found / row.published - 1

    def verdict(self, row: Row) -> str:
        """Return "" for a row as expected, "miss" for a known miss, otherwise what is wrong."""
        if abs(self.off(row)) <= self.tolerance:
            return "within the tolerance, but listed as a miss" if row.miss else ""
        return "miss" if row.miss else "outside the tolerance"
