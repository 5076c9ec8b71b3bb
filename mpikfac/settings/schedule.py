"""Damping, intervals, decay and learning rate as pure functions of the step.

A schedule maps a step (0, 1, 2, ...) to a number and keeps no state: what holds at a step does not
depend on the steps taken before it, so a restarted run and an uninterrupted one agree. Wherever a
schedule is accepted, a plain number is too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

Schedule = Callable[[int], float]


def _number(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
    return value


def _length(steps: int) -> int:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number of at least 1")
    return steps


def evaluate(value: float | Schedule, step: int, name: str = "value") -> float:
    """The number in force at `step`, of a plain number or of a schedule.

    Raises:
        ValueError: it is negative, infinite or not a number; the text calls it `name`.
    """
    if callable(value):
        return _number(f"schedule {name} at step {step}", value(step))
    return _number(name, value)


def every(interval: float | Schedule, step: int, name: str = "interval") -> bool:
    """True when `step` is a multiple of the interval (in steps) in force at that step.

    Step 0 is a multiple of every interval.

    Raises:
        ValueError: the interval is not a whole number of at least 1; the text calls it `name`.
    """
    steps = evaluate(interval, step, name)
    if steps < 1 or steps != int(steps):
        raise ValueError(f"{name}={steps!r} at step {step} must be a whole number of at least 1")
    return step % int(steps) == 0


def constant(value: float) -> Schedule:
    """`value` at every step."""
    _number("value", value)
    return lambda step: value


def step_decay(value: float, at: Iterable[int], factor: float) -> Schedule:
    """`value`, multiplied by `factor` once for every step in `at` that has been reached."""
    _number("value", value)
    _number("factor", factor)
    milestones = list(at)
    if any(not isinstance(step, int) or step < 0 for step in milestones):
        raise ValueError(f"at={milestones} must hold whole numbers of at least 0")
    if any(later <= earlier for earlier, later in itertools.pairwise(milestones)):
        raise ValueError(f"at={milestones} must be strictly increasing")
    return lambda step: value * factor ** sum(step >= reached for reached in milestones)


def linear(start: float, stop: float, steps: int) -> Schedule:
    """From `start` at step 0 in a straight line to `stop` at step `steps`; `stop` from then on."""
    _number("start", start)
    _number("stop", stop)
    _length(steps)
    return lambda step: start + (stop - start) * step / steps if step < steps else stop


def cosine(start: float, stop: float, steps: int) -> Schedule:
    """From `start` at step 0 along half a cosine to `stop` at step `steps`; `stop` from then on."""
    _number("start", start)
    _number("stop", stop)
    _length(steps)

    def value(step: int) -> float:
        if step >= steps:
            return stop
        return stop + (start - stop) * (1 + math.cos(math.pi * step / steps)) / 2

    return value


def warmup(schedule: float | Schedule, steps: int, from_factor: float = 0.0) -> Schedule:
    """`schedule` times a factor that grows from `from_factor` at step 0 to 1 at step `steps`."""
    if not callable(schedule):
        _number("schedule", schedule)
    _length(steps)
    if _number("from_factor", from_factor) > 1:
        raise ValueError(f"from_factor={from_factor!r} must be at most 1")

    def value(step: int) -> float:
        factor = from_factor + (1 - from_factor) * step / steps if step < steps else 1.0
        return factor * evaluate(schedule, step)

    return value


def in_force(name: str, setting: float | Schedule, step: int, below: float = math.inf) -> float:
    """Return the number of a setting at `step`: above 0, or with `below` at least 0 and below.

    Raises:
        ValueError: the number is out of its bounds; the text calls the setting `name`.
    """
    value = evaluate(setting, step, name)
    shown = f"{name} at step {step}={value!r}" if callable(setting) else f"{name}={value!r}"
    if value >= below:
        raise ValueError(f"{shown} must be at least 0 and below {below:g}")
    if below == math.inf and value == 0:
        raise ValueError(f"{shown} must be positive")
    return value


@dataclass(frozen=True)
class Settings:
    """The numbers of K-FAC, plain or as schedules; `KFAC` says what the numbers mean.

    A setting is checked at step 0 when the value is made, and whenever a step asks for a number.

    Raises:
        ValueError: a number out of its bounds, by name.
    """

    damping: float | Schedule
    factor_every: float | Schedule
    basis_every: float | Schedule
    decay: float | Schedule
    kl_clip: float | Schedule | None = None
    norm_clip: float | Schedule | None = None

    def __post_init__(self) -> None:
        for name in ("damping", "decay", "kl_clip", "norm_clip"):
            if getattr(self, name) is not None:
                self.at(name, 0)
        for name in ("factor_every", "basis_every"):
            self.due(name, 0)

    def at(self, name: str, step: int) -> float:
        """Return the damping, the decay or a bound on the step that is in force at `step`."""
        below = 1.0 if name == "decay" else math.inf
        return in_force(name, getattr(self, name), step, below)

    def due(self, name: str, step: int, turns: int = 1) -> bool:
        """Whether what happens every so many steps happens at `step`, or one of its `turns`.

        Raises:
            ValueError: the interval is not a multiple of `turns`.
        """
        if turns == 1:
            return every(getattr(self, name), step, name)
        return step % self._between(name, step, turns) == 0

    def turn(self, name: str, step: int, turns: int) -> int:
        """Which of the `turns` of an interval, from 0 on, the step belongs to."""
        return step // self._between(name, step, turns) % turns

    def _between(self, name: str, step: int, turns: int) -> int:
        """Steps from one turn to the next."""
        interval = evaluate(getattr(self, name), step, name)
        if interval % turns:
            raise ValueError(f"{name}={interval!r} must be a multiple of stagger={turns}")
        return int(interval) // turns

    @property
    def clipped(self) -> bool:
        """Whether something bounds the step."""
        return self.kl_clip is not None or self.norm_clip is not None

    def described(self) -> dict[str, object]:
        """The settings by name, for ranks to compare; schedules by their number at step 0."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: ("scheduled", v(0)) if callable(v) else v for n, v in values.items()}
