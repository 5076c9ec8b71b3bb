"""Group runs that differ only in the seed, and compute means with intervals or ranges."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from mpikfac import files
from mpikfac_apps.options.documents import flattened, loaded
from mpikfac_apps.text import listed

# Student's t for a 95 % interval, by degrees of freedom, starting at 1.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NORMAL = 1.959964  # Student's t for infinitely many degrees of freedom
OF_A_RUN = {"seed", "run_dir", "resume"}
"""Options that differ between the seeds of a variant."""
NAMED = 4  # maximum number of variants that a sentence names; more are only counted
LEAST = 3
"""The minimum number of seeds for an interval; for two, it would be 13 times their range."""


@dataclass(frozen=True)
class SeedMean:
    """The mean of a value over runs, the range of values, and the 95 % interval around the mean.

    Attributes:
        half: half the length of the interval; None for fewer runs than `LEAST`.
        count: the number of runs.
        low: the lowest value of any run.
        high: the highest value of any run.
    """

    mean: float
    half: float | None
    count: int
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, or those of the range if there is no interval."""
        if self.half is None:
            return self.low, self.high
        return self.mean - self.half, self.mean + self.half

    def scaled(self, factor: float) -> SeedMean:
        """Return the statistics of all values after multiplication by a positive factor."""
        half = None if self.half is None else factor * self.half
        low, high = factor * self.low, factor * self.high
        return SeedMean(factor * self.mean, half, self.count, low, high)

    def overlaps(self, mean: SeedMean) -> bool:
        """Return whether the interval (or range) overlaps with that of another mean.

        A single run overlaps with everything, because it shows no spread.
        """
        if 1 in (self.count, mean.count):
            return True
        return self.ends[0] <= mean.ends[1] and mean.ends[0] <= self.ends[1]

    @property
    def around(self) -> tuple[float, float, float]:
        """The lower end, the mean and the upper end of the interval (or range)."""
        return self.ends[0], self.mean, self.ends[1]

    def covers(self, value: float) -> bool:
        """Return whether a value lies in the interval (or range)."""
        return self.ends[0] <= value <= self.ends[1]

    @property
    def spread(self) -> str:
        """A plural name for what `ends` delimit: ranges or intervals."""
        return "ranges of seeds" if self.half is None else "95 % intervals over seeds"

    def text(self, show: Callable[[float], str]) -> str:
        """Format the mean and half of the interval, or the ends of the range, or the only value.

        Args:
            show: formats a number.
        """
        if self.half is not None:
            return f"{show(self.mean)} \N{PLUS-MINUS SIGN} {show(self.half)}"
        low, high = show(self.low), show(self.high)
        return low if low == high else f"{low} to {high}"


def mean_of(values: Iterable[float | None]) -> SeedMean | None:
    """Return the mean and the interval of all values except None; None if there are none.

    The interval uses Student's t, which assumes independent and normally distributed values.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    count, half = len(numbers), None
    if count >= LEAST:
        half = student(count - 1) * stdev(numbers) / math.sqrt(count)
    return SeedMean(fmean(numbers), half, count, min(numbers), max(numbers))


def student(freedom: int) -> float:
    """Return Student's t for a 95 % interval, accurate to 0.2 %.

    For more than 9 degrees of freedom, it is expanded around the normal quantile (Abramowitz and
    Stegun, 26.7.5).
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def leaders(means: Mapping[str, SeedMean]) -> list[str]:
    """Return the names of the lowest mean and of means whose intervals overlap with its interval.

    Names are sorted by mean. Single runs overlap only if they are equal.
    """
    order = sorted(means, key=lambda name: means[name].mean)
    least = means[order[0]]
    if max(mean.count for mean in means.values()) == 1:
        return [name for name in order if means[name].mean == least.mean]
    return [name for name in order if name == order[0] or means[name].overlaps(least)]


def doubt(means: Mapping[str, SeedMean]) -> str:
    """Return a sentence about means that may equal the lowest one; "" if there are none."""
    lowest, *near = leaders(means)
    if not near:
        return ""
    who = listed(near) if len(near) <= NAMED else f"{len(near)} of the {len(means) - 1} others"
    return f" No difference from {lowest} is shown for {who}: {means[lowest].spread} overlap."


# -- runs ----------------------------------------------------------------------------------------


def by_seed(runs: Iterable[Path]) -> list[list[Path]]:
    """Return runs in groups whose options differ only in the seed.

    A run without readable options forms its own group.
    """
    groups: dict[str, list[Path]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        options, seed = _options(run)
        seen[options + seed] += 1  # a repeated seed does not count as another seed
        groups.setdefault(f"{options}, {seen[options + seed]}", []).append(run)
    return list(groups.values())


def _options(run: Path) -> tuple[str, str]:
    """Return a run's options (with the number of ranks, but without the seed), and its seed."""
    try:
        content = loaded(files.read_text(run / "config.yaml"))
        about = files.read_json(run / "environment.json")
    except (OSError, ValueError):
        return str(run), ""
    if not files.has_form(content, {"seed": int}) or not files.has_form(about, {"ranks": int}):
        return str(run), ""
    options = {key: value for key, value in flattened(content).items() if key not in OF_A_RUN}
    options["number of ranks"] = about["ranks"]
    return json.dumps(options, sort_keys=True, default=str), str(content["seed"])
