"""Values that change with the epoch, written in the form of `EXAMPLE`."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXAMPLE = "0.03 until 30, 0.01 until 60, 0.003"


@dataclass(frozen=True)
class ByEpoch:
    """A schedule by epoch: an initial value and its changes.

    Attributes:
        first: the value at epoch 0.
        changes: the epochs at which the value changes, in ascending order, with the new values.
    """

    first: float
    changes: tuple[tuple[int, float], ...]

    def __call__(self, epoch: float) -> float:
        """Return the value at an epoch; 2.5 is the middle of the third epoch."""
        reached = (number for start, number in reversed(self.changes) if epoch >= start)
        return next(reached, self.first)

    def __str__(self) -> str:
        """Return the text from which `read` creates this schedule."""
        ends = [f"{n!r} until {end}" for n, (end, _) in zip(self.numbers, self.changes)]
        return ", ".join([*ends, repr(self.numbers[-1])])

    @property
    def numbers(self) -> tuple[float, ...]:
        """All values, in order."""
        return self.first, *(number for _, number in self.changes)


def read(text: str, kind: object) -> ByEpoch:
    """Parse a string of the form of `EXAMPLE`.

    Args:
        kind: the type of the option; for int, or a union with int, values must be whole numbers.

    Raises:
        ValueError: the string is not of the form of `EXAMPLE`, or the epochs do not increase.
    """
    number = int if int in (kind, *typing.get_args(kind)) else float
    *ended, last = text.split(",")
    pairs = [part.split("until") for part in ended]
    epochs = [int(epoch) for _, epoch in pairs]
    if any(later <= earlier for earlier, later in itertools.pairwise([0, *epochs])):
        raise ValueError(text)
    first, *later = [number(value) for value in [*(value for value, _ in pairs), last]]
    return ByEpoch(first, tuple(zip(epochs, later)))


def by_step(value: Any, epochs: Callable[[int], float]) -> Any:
    """Convert a `ByEpoch` to a schedule of steps; return any other value unchanged.

    Args:
        epochs: returns the number of epochs before a step.
    """
    if not isinstance(value, ByEpoch):
        return value
    return lambda step: value(epochs(step))


def at_start(value: object) -> Any:
    """Return a `ByEpoch`'s value at epoch 0; return any other value unchanged."""
    return value.first if isinstance(value, ByEpoch) else value


def numbers_of(value: Any) -> tuple[Any, ...]:
    """Return all values of a `ByEpoch`, or any other value alone."""
    return value.numbers if isinstance(value, ByEpoch) else (value,)
