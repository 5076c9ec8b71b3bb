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
    """Lower the damping if the quadratic model predicts the loss well; raise it if it is far off.

    Pass it to `KFAC` as `damping`. `KFAC.update_damping` changes the damping every few steps
    [Martens & Grosse 2015, 6.5].

    Args:
        damping: the initial damping; later, the current damping.
        damping_adaptation_interval: the number of steps between calls of `KFAC.update_damping`.
        damping_adaptation_decay: the factor per step, in (0, 1), by which the damping is
            multiplied or divided.
        min_damping: the minimum damping.
        max_damping: the maximum damping.

    Raises:
        ValueError: a value is out of bounds.
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
        """Return the current damping, regardless of `step`."""
        return self.damping

    def due(self, steps: int) -> bool:
        """Return whether to call `KFAC.update_damping` after `steps` steps."""
        return steps % self.damping_adaptation_interval == 0

    def follow(self, ratio: float) -> None:
        """Adapt the damping to the ratio of the actual to the predicted change in the loss."""
        factor = self.damping_adaptation_decay**self.damping_adaptation_interval
        if ratio > GOOD:
            self.damping = max(self.damping * factor, self.min_damping)
        elif not ratio >= POOR:  # also if a loss, and so the ratio, is NaN
            self.damping = min(self.damping / factor, self.max_damping)


@dataclass(frozen=True)
class Damping:
    """Tikhonov damping: a number added to the eigenvalues of each layer's `G (x) A`.

    The number is a constant, a schedule (a function of the step), or a `LevenbergMarquardt`, which
    `KFAC.update_damping` adapts. The larger the damping, the more a step resembles an SGD step. Set
    `value` or `relative`, not both; if neither is set, `relative` is 10.

    Args:
        value: the damping itself.
        relative: the damping as a multiple of the mean eigenvalue of each layer's `G (x) A`, or of
            each block, if factors are cut into blocks. A relative damping suits all losses and
            networks, and need not be tuned as gradients shrink.

    Raises:
        ValueError: the damping is not positive at step 0, or both `value` and `relative` are set.
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
        """Whichever of `value` and `relative` is set."""
        number = self.value if self.relative is None else self.relative
        assert number is not None, "one of the two numbers is set"
        return number

    @property
    def is_relative(self) -> bool:
        """Whether the damping is a multiple of the mean eigenvalue."""
        return self.relative is not None

    @property
    def adapted(self) -> LevenbergMarquardt | None:
        """The damping, if `KFAC.update_damping` adapts it; None otherwise."""
        return self.number if isinstance(self.number, LevenbergMarquardt) else None
