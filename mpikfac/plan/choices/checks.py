"""Check single choices: each refusal is a line with name, value, and the values that are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """Return a number of any library as Python's int or float, and all else as it is.

    An array or a tensor of a single element holds a number.
    """
    if math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def make_plain(choices: object) -> None:
    """Make the numbers in the fields of choices Python's own; plans print and compare them."""
    for name, value in vars(choices).items():
        alike = tuple(map(plain, value)) if type(value) is tuple else plain(value)
        object.__setattr__(choices, name, alike)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending: the counts of workers for so many ranks."""
    return [d for d in range(1, number + 1) if number % d == 0]


def check_divides(name: str, count: int, ranks: int) -> None:
    """Return if the ranks fall into groups of `count`.

    Raises:
        ValueError: the ranks do not; the text calls the count `name`.
    """
    if count < 1 or ranks % count:
        raise ValueError(
            f"{name}={count} must divide the number of ranks ({ranks}); "
            f"try one of {divisors(ranks)}"
        )


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Return if `value` is allowed.

    Raises:
        ValueError: the value is not allowed; the text calls the value `name` and lists all allowed.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_count(name: str, value: Any, least: int) -> int:
    """Return `value`, a whole number of at least `least`.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    count = plain(value)
    if type(count) is not int or count < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return count


def check_positive(name: str, value: Any) -> None:
    """Return if `value` is a number above 0; infinity is a number.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{name}={value!r} must be a number above 0")


def check_share(name: str, value: Any) -> None:
    """Return if `value` is a number from 0 to 1.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to 1")


def check_fraction(name: str, value: Any) -> None:
    """Return if `value` is a number from 0 to below 1, as a momentum is.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to below 1")


def check_size(name: str, value: Any) -> float:
    """Return `value`, a finite number of at least 0.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    size = plain(value)
    if type(size) not in (int, float) or not 0 <= size < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
    return size
