"""Damping: a number, a schedule, or adapted to how well the quadratic model predicts the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpikfac.plan import check_count, check_positive, make_plain
from mpikfac.settings.schedule import Schedule, in_force
from mpikfac.settings.usual import SHARE

GOOD, POOR = 3 / 4, 1 / 4


@dataclass
class LevenbergMarquardt:
    """Lower damping where the quadratic model is right, higher damping where it promises too much.

    `KFAC` takes the value as its `damping`. `KFAC.update_damping` changes the damping every few
    steps [Martens & Grosse 2015, 6.5].

    Args:
        damping: the damping at first; from then on, the damping in force.
        damping_adaptation_interval: steps from one call of `KFAC.update_damping` to the next.
        damping_adaptation_decay: a step multiplies the damping by this factor, or divides the
            damping by it, in (0, 1).
        min_damping: the lowest damping.
        max_damping: the highest damping.

    Raises:
        ValueError: a number out of its bounds.
    """

    damping: float = 0.03
    damping_adaptation_interval: int = 5
    damping_adaptation_decay: float = 19 / 20
    min_damping: float = 1e-8
    max_damping: float = 100.0

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("damping_adaptation_interval", self.damping_adaptation_interval, 1)
        for name in ("damping_adaptation_decay", "min_damping", "damping", "max_damping"):
            check_positive(name, getattr(self, name))
        if not 0 < self.damping_adaptation_decay < 1:
            raise ValueError(
                f"damping_adaptation_decay={self.damping_adaptation_decay!r} must be above 0 and "
                f"below 1"
            )
        if not 0 < self.min_damping <= self.damping <= self.max_damping < math.inf:
            raise ValueError(
                f"min_damping={self.min_damping!r}, damping={self.damping!r} and "
                f"max_damping={self.max_damping!r} must be finite numbers above 0 in ascending "
                f"order"
            )

    def __call__(self, step: int) -> float:
        """Return the damping in force, at any step."""
        return self.damping

    def due(self, steps: int) -> bool:
        """Return whether `KFAC.update_damping` is to be called after `steps` steps."""
        return steps % self.damping_adaptation_interval == 0

    def follow(self, ratio: float) -> None:
        """Change the damping by the ratio of the change of the loss to the predicted change."""
        factor = self.damping_adaptation_decay**self.damping_adaptation_interval
        if ratio > GOOD:
            self.damping = max(self.damping * factor, self.min_damping)
        elif not ratio >= POOR:  # also where a loss is NaN
            self.damping = min(self.damping / factor, self.max_damping)


@dataclass(frozen=True)
class Damping:
    """Tikhonov damping: the number that is added to the eigenvalues of each layer's `G (x) A`.

    The number is a constant, a schedule (a function of the step), or a `LevenbergMarquardt`, whose
    number `KFAC.update_damping` changes. Steps with a larger damping are more like steps of SGD. At
    most one of both numbers is given; without a number, `relative` is 10.

    Args:
        value: the damping itself.
        relative: the damping as a share of the mean eigenvalue of each layer's `G (x) A`, or of
            each block, where factors fall into blocks. The share is right for all losses and
            networks alike, and needs no tuning when gradients shrink.

    Raises:
        ValueError: a number that is not positive at step 0, or two numbers.
    """

    value: float | Schedule | LevenbergMarquardt | None = None
    relative: float | Schedule | LevenbergMarquardt | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.value is not None and self.relative is not None:
            raise ValueError(
                f"damping={self.value!r} and relative_damping={self.relative!r} exclude each "
                f"other; leave one of them out"
            )
        if self.value is None and self.relative is None:
            object.__setattr__(self, "relative", SHARE)
        in_force("damping" if self.relative is None else "relative_damping", self.number, 0)

    @property
    def number(self) -> float | Schedule | LevenbergMarquardt:
        """The number that is given, of both."""
        number = self.value if self.relative is None else self.relative
        assert number is not None, "one of both numbers is given"
        return number

    @property
    def is_relative(self) -> bool:
        """Whether the number is a share of the mean eigenvalue."""
        return self.relative is not None

    @property
    def adapted(self) -> LevenbergMarquardt | None:
        """The number, if `KFAC.update_damping` changes the number."""
        return self.number if isinstance(self.number, LevenbergMarquardt) else None
