"""Schedules of damping, intervals, decay and learning rate as pure functions of the step.

A schedule maps a step (0, 1, 2, ...) to a number. It keeps no state, so a resumed run gets the same
numbers as an uninterrupted one. A number is accepted wherever a schedule is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from mpikfac.plan import check_count, check_size, plain

Schedule = Callable[[int], float]


def evaluate(value: float | Schedule, step: int, name: str = "value") -> float:
    """Return the value of a number or a schedule at `step`.

    Raises:
        ValueError: the value is not a finite number >= 0; the message refers to it as `name`.
    """
    if callable(value):
        return check_size(f"schedule {name} at step {step}", value(step))
    return check_size(name, value)


def every(interval: float | Schedule, step: int, name: str = "interval") -> bool:
    """Return whether `step` is a multiple of the interval's value at `step`, in steps.

    Step 0 is a multiple of every interval.

    Raises:
        ValueError: the interval is not a whole number >= 1; the message refers to it as `name`.
    """
    steps = evaluate(interval, step, name)
    if steps < 1 or steps != int(steps):
        raise ValueError(f"{name}={steps!r} at step {step} must be a whole number >= 1")
    return step % int(steps) == 0


def constant(value: float) -> Schedule:
    """Return a schedule that is always `value`."""
    number = check_size("value", value)
    return lambda _: number


def step_decay(value: float, at: Iterable[int], factor: float) -> Schedule:
    """Return a schedule that starts at `value` and is multiplied by `factor` at the steps `at`."""
    value, factor = check_size("value", value), check_size("factor", factor)
    milestones = [plain(step) for step in at]
    if any(not isinstance(step, int) or step < 0 for step in milestones):
        raise ValueError(f"at={milestones} must contain only whole numbers >= 0")
    if any(later <= earlier for earlier, later in itertools.pairwise(milestones)):
        raise ValueError(f"at={milestones} must be strictly increasing")
    return lambda step: value * factor ** sum(step >= reached for reached in milestones)


def linear(start: float, stop: float, steps: int) -> Schedule:
    """Return a line from `start` at step 0 to `stop` at step `steps`, constant afterwards."""
    start, stop = check_size("start", start), check_size("stop", stop)
    steps = check_count("steps", steps, 1)
    return lambda step: start + (stop - start) * step / steps if step < steps else stop


def cosine(start: float, stop: float, steps: int) -> Schedule:
    """Return half a cosine from `start` at step 0 to `stop` at step `steps`, then constant."""
    start, stop = check_size("start", start), check_size("stop", stop)
    steps = check_count("steps", steps, 1)

    def value(step: int) -> float:
        if step >= steps:
            return stop
        return stop + (start - stop) * (1 + math.cos(math.pi * step / steps)) / 2

    return value


def warmup(schedule: float | Schedule, steps: int, from_factor: float = 0.0) -> Schedule:
    """Return `schedule` times a linear factor: `from_factor` at step 0, 1 from step `steps` on."""
    if not callable(schedule):
        schedule = check_size("schedule", schedule)
    steps, from_factor = check_count("steps", steps, 1), check_size("from_factor", from_factor)
    if from_factor > 1:
        raise ValueError(f"from_factor={from_factor!r} must be at most 1")

    def value(step: int) -> float:
        factor = from_factor + (1 - from_factor) * step / steps if step < steps else 1.0
        return factor * evaluate(schedule, step)

    return value


SETTLED = 160
"""The step from which a `growing` interval is constant."""


def growing(interval: int, multiple: int = 1) -> Schedule:
    """Return a schedule that grows from a tenth of the interval to all of it at step 160.

    The tenth is doubled at steps 20, 40 and 80. Updates are most useful at the beginning, when
    factors are averages of few batches and weights change fastest.

    Args:
        multiple: a number of which the interval is a multiple at every step.
    """
    tenths = ((20, 1), (40, 2), (80, 4), (SETTLED, 8), (math.inf, 10))

    def value(step: int) -> float:
        share = next(tenth for end, tenth in tenths if step < end)
        return multiple * -(-share * interval // (10 * multiple))  # rounded up

    return value


def in_force(name: str, setting: float | Schedule, step: int, below: float = math.inf) -> float:
    """Return a setting's value at `step`; it must be positive or, with `below`, in [0, `below`).

    Raises:
        ValueError: the value is out of bounds; the message refers to it as `name`.
    """
    value = evaluate(setting, step, name)
    shown = f"{name}={value!r} at step {step}" if callable(setting) else f"{name}={value!r}"
    if value >= below:
        raise ValueError(f"{shown} must be at least 0 and below {below:g}")
    if below == math.inf and value == 0:
        raise ValueError(f"{shown} must be positive")
    return value
