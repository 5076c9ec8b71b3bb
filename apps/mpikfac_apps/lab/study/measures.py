"""Test metrics: which values are better, and how values are formatted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpikfac_apps.text import key_of, measured, share

if TYPE_CHECKING:  # `mpikfac compare` does not import torch
    from mpikfac_apps.problems import tasks


@dataclass(frozen=True)
class Measure:
    """A metric that is computed in a run's tests, such as accuracy.

    Attributes:
        name: the metric's name in text.
        best: returns the best of several values.
        worst: returns the worst of several values.
        perfect: the best possible value.
        scale: the factor by which values are multiplied on the axis of a picture.
        axis: the title of this axis.
    """

    name: tasks.Measure
    best: Callable[[Iterable[float]], float]
    worst: Callable[[Iterable[float]], float]
    perfect: float
    scale: float
    axis: str

    @property
    def key(self) -> str:
        """The metric's key in the lines of metrics.jsonl, such as "test_accuracy"."""
        return f"test_{key_of(self.name)}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target; NaN is not."""
        return self.best((value, target)) == value

    def reached_by_all(self, bests: Sequence[float]) -> float:
        """Return a value with three decimals that all runs reach, given their best values."""
        thousandths = 1000 * self.worst(bests)
        return self.worst((math.floor(thousandths), math.ceil(thousandths))) / 1000

    def possible(self, value: float) -> float:
        """Return a value for a picture's axis, limited to the best possible value."""
        return self.worst((value, self.scale * self.perfect))

    def limits(self, middles: Sequence[float]) -> tuple[float, float]:
        """Return the ends of a picture's axis, given each run's value halfway through training."""
        best, worst = self.scale * self.perfect, self.scale * self.worst(middles)
        low, high = sorted((best + (best - worst) / 100, worst + (worst - best) / 10))
        return low, high

    def target(self, value: float) -> float:
        """Return a target as a value of the metric; an accuracy can also be given in per cent.

        Raises:
            ValueError: an accuracy is above 100 per cent.
        """
        if self.name != "accuracy":
            return value
        if value > 100:
            raise ValueError(f"target={value} must be at most 100: an accuracy in per cent")
        return share(value)

    def text(self, value: float | None, digits: int = 1) -> str:
        """Format a value; `digits` is the number of decimals of an accuracy in per cent."""
        return measured(self.name, value, digits)


MEASURES: dict[tasks.Measure, Measure] = {
    "accuracy": Measure("accuracy", max, min, 1.0, 100.0, "test accuracy (%)"),
    "error": Measure("error", min, max, 0.0, 1.0, "squared test error per image"),
    "dice": Measure("dice", max, min, 1.0, 1.0, "Dice coefficient of the test"),
    "bits per byte": Measure("bits per byte", min, max, 0.0, 1.0, "bits per byte of the test"),
}


def common(measures: Iterable[Measure]) -> Measure:
    """Return the test metric that several runs share.

    Raises:
        ValueError: the runs have different test metrics.
    """
    first, *others = {measure.name: measure for measure in measures}.values()
    if others:
        raise ValueError(
            "classifiers are measured by accuracy, autoencoders by error, language models by bits "
            "per byte, and segmenters by dice; pass runs of one kind"
        )
    return first
