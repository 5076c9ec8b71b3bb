"""Check single choices: each refusal is a line with name, value, and the values that are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


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


def check_count(name: str, value: object, least: int) -> None:
    """Return if `value` is a whole number of at least `least`.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


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


def check_size(name: str, value: Any) -> None:
    """Return if `value` is a finite number of at least 0.

    Raises:
        ValueError: the value is not; the text calls the value `name`.
    """
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
