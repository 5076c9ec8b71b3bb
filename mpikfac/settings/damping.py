"""Damping that follows how well K-FAC's quadratic model predicts the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

GOOD, POOR = 3 / 4, 1 / 4


@dataclass
class LevenbergMarquardt:
    """Lower damping where the quadratic model is right, higher damping where it promises too much.

    Given to `KFAC` as its `damping`, and told by `KFAC.adapt` every so many steps
    [Martens & Grosse 2015, 6.5].

    Args:
        damping: that at first; from then on, the one in force.
        every: steps from one call of `KFAC.adapt` to the next.
        decay: what the damping is multiplied by in a step, or divided by, in (0, 1).
        least: the lowest damping.
        most: the highest damping.

    Raises:
        ValueError: a number out of its bounds.
    """

    damping: float = 0.03
    every: int = 5
    decay: float = 19 / 20
    least: float = 1e-8
    most: float = 100.0

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every={self.every!r} must be a whole number of at least 1")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay={self.decay!r} must be above 0 and below 1")
        if not 0 < self.least <= self.damping <= self.most < math.inf:
            raise ValueError(
                f"least={self.least!r}, damping={self.damping!r} and most={self.most!r} must be "
                f"finite numbers above 0 in ascending order"
            )

    def __call__(self, step: int) -> float:
        """The damping in force, whatever the step is."""
        return self.damping

    def due(self, steps: int) -> bool:
        """Whether `KFAC.adapt` is to be called after so many steps."""
        return steps % self.every == 0

    def follow(self, ratio: float) -> None:
        """Changes the damping by the ratio of what the loss changed by to what was predicted."""
        factor = self.decay**self.every
        if ratio > GOOD:
            self.damping = max(self.damping * factor, self.least)
        elif not ratio >= POOR:  # also where a loss is NaN
            self.damping = min(self.damping / factor, self.most)
