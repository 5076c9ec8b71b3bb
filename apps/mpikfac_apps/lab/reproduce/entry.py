"""An entry of `mpikfac reproduce`: a published result, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal[
    "agrees",
    "record agrees",
    "fitted",
    "miss",
    "outside the tolerance",
    "within the tolerance, but listed as a miss",
]
VERDICTS: dict[Verdict, str] = {
    "agrees": "differs by at most the tolerance",
    "record agrees": "a recorded value differs by at most the tolerance; it was not measured again",
    "fitted": "differs by at most the tolerance, but a constant of the model was fitted to the "
    "expected value, so this does not test the model",
    "miss": "is known to differ by more than the tolerance; the reason follows. The exit code "
    "remains 0",
    "outside the tolerance": "differs by more than the tolerance, which is an error. A prediction "
    "does not depend on this machine; repeat a measurement on idle cores before you report it",
    "within the tolerance, but listed as a miss": "agrees, although a miss was expected. This is "
    "an error, counted as outside: the reason for the miss is outdated",
}
"""The verdicts on a row, and what they say about it."""
ERRORS: tuple[Verdict, ...] = (
    "outside the tolerance",
    "within the tolerance, but listed as a miss",
)


class Row(NamedTuple):
    """A published value, and the value found here.

    Attributes:
        what: the quantity, and its unit if it has one.
        where: the network, ranks or machine.
        published: the expected value, or the lower end of its range; see `Entry.expected`.
        miss: for values that differ by more than the tolerance, the known reason; "" if they
            should agree.
        most: the upper end of the expected range; None for a single value.
        fitted: whether a constant of the model was fitted to the expected value.
    """

    what: str
    where: str
    published: float
    found: float
    miss: str = ""
    most: float | None = None
    fitted: bool = False

    @property
    def nearest(self) -> float:
        """The expected value that is nearest to the value found."""
        most = self.published if self.most is None else self.most
        return min(max(self.published, self.found), most)


@dataclass(frozen=True)
class Entry:
    """A published result.

    Attributes:
        about: what is compared.
        paper: the short name of the paper in docs/reference/references.md, preceded by "method of"
            if the values are not from the paper.
        source: the table, figure or formula with the expected values.
        found: how `rows` finds its values; "recorded" means in the results of an earlier run of the
            commands in `anew`, which take hours.
        how: a continuation of `found`: the machine model, the ranks and threads, or the date.
        tolerance: the largest deviation that is accepted for a row without a `miss`.
        why: the reason for the tolerance.
        seconds: the time that `mpikfac reproduce` takes for this entry on two idle cores.
        rows: computes the rows, in less than a minute.
        data: the data set that `rows` reads.
        anew: how to repeat the recorded measurements.
        expected: the source of the expected values, as the title of their column.
        points: whether rows are percentages, whose deviation is a difference in points; otherwise,
            it is relative.
    """

    name: str
    about: str
    paper: str
    source: str
    found: Literal["predicted", "measured", "recorded"]
    how: str
    tolerance: float
    why: str
    seconds: float
    rows: Callable[[], Iterable[Row]]
    data: str = "none"
    anew: str = ""
    expected: Literal[
        "published", "derived", "by the formula", "by the rule", "simulated", "recorded"
    ] = "published"
    points: bool = False

    @property
    def kind(self) -> str:
        """How `rows` finds its values, with the details in `how`."""
        return f"{self.found} {self.how}"

    def off(self, row: Row) -> float:
        """Return the deviation of a row's value from the expected value."""
        return row.found - row.nearest if self.points else row.found / row.nearest - 1

    def verdict(self, row: Row) -> Verdict:
        """Return the verdict on a row: whether its value is as expected."""
        within = abs(self.off(row)) <= self.tolerance
        if row.miss:
            return "within the tolerance, but listed as a miss" if within else "miss"
        if not within:
            return "outside the tolerance"
        if row.fitted:
            return "fitted"
        return "record agrees" if self.found == "recorded" else "agrees"
