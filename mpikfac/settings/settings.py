"""The numbers of K-FAC, plain or as schedules, at any step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpikfac.settings.damping import Damping
from mpikfac.settings.length import Length
from mpikfac.settings.schedule import Schedule, evaluate, every, in_force


@dataclass(frozen=True)
class Settings:
    """The numbers of K-FAC, plain or as schedules; `KFAC` says what the numbers mean.

    A setting is checked at step 0 when the value is made, and whenever a step asks for a number.

    Raises:
        ValueError: a number out of its bounds, by name.
    """

    damping: Damping
    factor_every: float | Schedule
    basis_every: float | Schedule
    decay: float | Schedule
    length: Length

    def __post_init__(self) -> None:
        for name in ("factor_every", "basis_every"):
            self.due(name, 0)

    def at(self, name: str, step: int) -> float:
        """Return the damping, the decay or a bound on the step that is in force at `step`."""
        below = 1.0 if name == "decay" else math.inf
        setting = self._numbers()[name]
        assert setting is not None, f"nothing sets {name}"
        return in_force(name, setting, step, below)

    def due(self, name: str, step: int, turns: int = 1) -> bool:
        """Return whether an interval begins at `step`, or one of the interval's `turns`.

        Raises:
            ValueError: the interval is not a multiple of `turns`.
        """
        if turns == 1:
            return every(getattr(self, name), step, name)
        return step % self._between(name, step, turns) == 0

    def interval(self, name: str, step: int) -> int:
        """Return an interval in steps that is in force at `step`."""
        return self._between(name, step, 1)

    def turn(self, name: str, step: int, turns: int) -> int:
        """Return the number, from 0 on, of the turn of an interval that `step` belongs to."""
        return step // self._between(name, step, turns) % turns

    def _between(self, name: str, step: int, turns: int) -> int:
        """Return the steps from one turn to the next."""
        interval = evaluate(getattr(self, name), step, name)
        if interval % turns:
            raise ValueError(f"{name}={interval!r} must be a multiple of stagger={turns}")
        return int(interval) // turns

    def described(self) -> dict[str, object]:
        """Return the settings by name, for ranks to compare; schedules by their value at step 0."""
        values = self._numbers()
        found = {n: ("scheduled", v(0)) if callable(v) else v for n, v in values.items()}
        return found | {
            "relative": self.damping.is_relative,
            "adapted": self.damping.adapted,
            "length": self.length.source,
            "momentum": self.length.momentum,
        }

    def _numbers(self) -> dict[str, float | Schedule | None]:
        return {
            "damping": self.damping.number,
            "factor_every": self.factor_every,
            "basis_every": self.basis_every,
            "decay": self.decay,
            **self.length.bounds,
        }
