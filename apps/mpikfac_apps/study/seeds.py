"""Compute means over seeds, with intervals of confidence or, of few seeds, ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t for an interval of 95 %, by degrees of freedom from 1.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.959964  # Student's t for infinitely many degrees of freedom
LEAST = 3
"""Seeds of an interval: of two seeds, Student's interval is 13 times as long as the range."""


@dataclass(frozen=True)
class SeedMean:
    """The mean of several runs, the range of the runs, and the interval of 95 % around the mean.

    Attributes:
        half: half the length of the interval; None for fewer runs than `LEAST`.
        count: the number of runs.
        low: the least value of a run.
        high: the largest value of a run.
    """

    mean: float
    half: float | None
    count: int
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, or of the range without an interval."""
        if self.half is None:
            return self.low, self.high
        return self.mean - self.half, self.mean + self.half

    def overlaps(self, mean: SeedMean) -> bool:
        """Return whether the intervals (or ranges) share a point; a single run overlaps with all.

        A single run says nothing about further runs.
        """
        if 1 in (self.count, mean.count):
            return True
        return self.ends[0] <= mean.ends[1] and mean.ends[0] <= self.ends[1]

    def text(self, show: Callable[[float], str]) -> str:
        """Return mean and half of the interval; "low to high" of two runs; the value of a single run.

        Args:
            show: returns a number as text.
        """
        if self.half is not None:
            return f"{show(self.mean)} \N{PLUS-MINUS SIGN} {show(self.half)}"
        return show(self.mean) if self.count == 1 else f"{show(self.low)} to {show(self.high)}"


def mean_of(values: Iterable[float | None]) -> SeedMean | None:
    """Return the mean and the interval of the known values; None if no value is known.

    The interval is Student's: the values count as independent and normally distributed.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    count, half = len(numbers), None
    if count >= LEAST:
        half = student(count - 1) * stdev(numbers) / math.sqrt(count)
    return SeedMean(fmean(numbers), half, count, min(numbers), max(numbers))


def student(freedom: int) -> float:
    """Return Student's t for an interval of 95 %, correct to 0.2 %.

    Above the table, the function expands around the normal quantile (Abramowitz and Stegun,
    26.7.5).
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
