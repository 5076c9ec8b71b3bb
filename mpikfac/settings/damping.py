"""Damping: a number, a schedule, or adapted to how well the quadratic model predicts the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpikfac.plan import one_of
from mpikfac.settings.schedule import Schedule, in_force

GOOD, POOR = 3 / 4, 1 / 4


@dataclass
class LevenbergMarquardt:
    """Lower damping where the quadratic model is right, higher damping where it promises too much.

    `KFAC` takes the value as its `damping`. `KFAC.adapt` changes the damping every few steps
    [Martens & Grosse 2015, 6.5].

    Args:
        damping: the damping at first; from then on, the damping in force.
        every: steps from one call of `KFAC.adapt` to the next.
        decay: a step multiplies the damping by `decay`, or divides by `decay`, in (0, 1).
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
        """Return the damping in force, at any step."""
        return self.damping

    def due(self, steps: int) -> bool:
        """Return whether `KFAC.adapt` is to be called after `steps` steps."""
        return steps % self.every == 0

    def follow(self, ratio: float) -> None:
        """Change the damping by the ratio of the change of the loss to the predicted change."""
        factor = self.decay**self.every
        if ratio > GOOD:
            self.damping = max(self.damping * factor, self.least)
        elif not ratio >= POOR:  # also where a loss is NaN
            self.damping = min(self.damping / factor, self.most)


@dataclass(frozen=True)
class Damping:
    """Tikhonov damping.

    The value is a number, a schedule (a function of the step), or a `LevenbergMarquardt`, whose
    number `KFAC.adapt` changes.

    Args:
        value: the damping: the number that is added to the eigenvalues of each layer's curvature
            `G (x) A` before the inversion. Steps with a larger damping are more like steps of SGD.
        relative: the damping is relative to the curvature: the damping times the mean eigenvalue is
            added to each layer's `G (x) A`, or to each block, where factors fall into blocks.

    Raises:
        ValueError: a value that is not positive at step 0.
    """

    value: float | Schedule | LevenbergMarquardt = 0.003
    relative: bool = False

    def __post_init__(self) -> None:
        in_force("damping", self.value, 0)
        one_of("relative", self.relative, (False, True))

    @property
    def adapted(self) -> LevenbergMarquardt | None:
        """The value, if `KFAC.adapt` changes it."""
        return self.value if isinstance(self.value, LevenbergMarquardt) else None
