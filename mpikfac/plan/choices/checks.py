"""Checks of single choices: an error is one line with the name, the value, and valid values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """Return a number from any library as a Python int or float, and anything else unchanged.

    An array or tensor with a single element counts as a number.
    """
    if math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def make_plain(choices: object) -> None:
    """Convert numbers in the fields of choices to Python types, so they can be compared."""
    for name, value in vars(choices).items():
        alike = tuple(map(plain, value)) if type(value) is tuple else plain(value)
        object.__setattr__(choices, name, alike)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending; they are the possible numbers of workers."""
    return [d for d in range(1, number + 1) if number % d == 0]


def check_divides(name: str, count: int, ranks: int) -> None:
    """Check that the ranks can be divided into groups of `count`.

    Raises:
        ValueError: `count` does not divide `ranks`; the message refers to it as `name`.
    """
    if count < 1 or ranks % count:
        raise ValueError(
            f"{name}={count} must divide the number of ranks ({ranks}); "
            f"try one of {divisors(ranks)}"
        )


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Check that `value` is allowed.

    Raises:
        ValueError: it is not allowed; the message refers to it as `name` and lists allowed values.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_count(name: str, value: Any, least: int) -> int:
    """Return `value` if it is a whole number >= `least`.

    Raises:
        ValueError: the value is something else; the message refers to it as `name`.
    """
    count = plain(value)
    if type(count) is not int or count < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
    return count


def check_positive(name: str, value: Any) -> None:
    """Check that `value` is a number above 0; infinity is accepted.

    Raises:
        ValueError: the value is something else; the message refers to it as `name`.
    """
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{name}={value!r} must be a number above 0")


def check_share(name: str, value: Any) -> None:
    """Check that `value` is a number in [0, 1].

    Raises:
        ValueError: the value is something else; the message refers to it as `name`.
    """
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to 1")


def check_fraction(name: str, value: Any) -> None:
    """Check that `value` is a number in [0, 1), such as a momentum.

    Raises:
        ValueError: the value is something else; the message refers to it as `name`.
    """
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number in [0, 1)")


def check_size(name: str, value: Any) -> float:
    """Return `value` if it is a finite number >= 0.

    Raises:
        ValueError: the value is something else; the message refers to it as `name`.
    """
    size = plain(value)
    if type(size) not in (int, float) or not 0 <= size < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number >= 0")
    return size
