"""Compute means over seeds, with intervals of confidence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t for an interval of 95 %, by degrees of freedom from 1.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.959964  # Student's t for infinitely many degrees of freedom


@dataclass(frozen=True)
class SeedMean:
    """The mean of several runs, and the interval of 95 % around the mean.

    Attributes:
        half: half the length of the interval; None for a single run.
        count: the number of runs.
    """

    mean: float
    half: float | None
    count: int

    def overlaps(self, interval: SeedMean) -> bool:
        """Return whether the intervals share a point; a missing interval overlaps with all."""
        if self.half is None or interval.half is None:
            return True
        return abs(self.mean - interval.mean) <= self.half + interval.half


def mean_of(values: Iterable[float | None]) -> SeedMean | None:
    """Return the mean and the interval of the known values; None if no value is known.

    The interval is Student's: the values count as independent and normally distributed.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if len(numbers) == 1:
        return SeedMean(numbers[0], None, 1)
    half = student(len(numbers) - 1) * stdev(numbers) / math.sqrt(len(numbers))
    return SeedMean(fmean(numbers), half, len(numbers))


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
