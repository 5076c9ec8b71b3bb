"""Equations on the unit square with known solutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PI = math.pi
WAVE_NUMBER = 2 * PI
DIFFUSION = 0.25
VISCOSITY, SPEED = 0.02, 0.5
SQUARE = ((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0))
START = ((0, 0.0), (0, 1.0), (1, 0.0))  # both ends of x, and t = 0


class Function(Protocol):
    """The values `[points]` of a function, and its derivatives `[points, 2]` along both axes."""

    @property
    def value(self) -> Tensor:
        """The values of the function."""

    @property
    def first(self) -> Tensor:
        """The first derivatives along both axes."""

    @property
    def second(self) -> Tensor:
        """The second derivatives along both axes."""


@dataclass(frozen=True)
class Equation:
    """An equation on the unit square, in (x, y) or (x, t).

    Attributes:
        text: the equation, as it is printed.
        exact: returns the exact solution `[points]` at points `[points, 2]`.
        residual: returns the residual of a function at points, given the unknown coefficients.
        sides: the sides of the square on which values are given, each as an axis and the constant
            coordinate along this axis.
        weight: the weight of the equation's squared residuals; the weight of given values is 1.
        coefficients: the exact values of the coefficients that are to be found.
        inside: the number of points inside the square at which values are given.
    """

    text: str
    exact: Callable[[Tensor], Tensor]
    residual: Callable[[Function, Tensor, Tensor], Tensor]
    sides: tuple[tuple[int, float], ...]
    weight: float = 1.0
    coefficients: tuple[float, ...] = ()
    inside: int = 0


def waves(p: Tensor, *counts: int) -> Tensor:
    """Return the product over the axes of sin(count pi x), where x is the axis's coordinate."""
    return (PI * p * torch.tensor(counts)).sin().prod(1)


def of_poisson(u: Function, p: Tensor, _: Tensor) -> Tensor:
    """Return the residual of u_xx + u_yy = -2 pi^2 sin(pi x) sin(pi y)."""
    return u.second.sum(1) + 2 * PI**2 * waves(p, 1, 1)


def of_helmholtz(u: Function, p: Tensor, _: Tensor) -> Tensor:
    """Return the residual of u_xx + u_yy + k^2 u = (k^2 - 8 pi^2) sin(2 pi x) sin(2 pi y)."""
    source = (WAVE_NUMBER**2 - 8 * PI**2) * waves(p, 2, 2)
    return u.second.sum(1) + WAVE_NUMBER**2 * u.value - source


def of_heat(u: Function, *_: Tensor) -> Tensor:
    """Return the residual of u_t = u_xx / 4."""
    return u.first[:, 1] - DIFFUSION * u.second[:, 0]


def heat(p: Tensor) -> Tensor:
    """Return the solution of the heat equation: a sine wave in x that decays with time."""
    return (-DIFFUSION * PI**2 * p[:, 1]).exp() * (PI * p[:, 0]).sin()


def of_burgers(u: Function, *_: Tensor) -> Tensor:
    """Return the residual of u_t + u u_x = nu u_xx."""
    return u.first[:, 1] + u.value * u.first[:, 0] - VISCOSITY * u.second[:, 0]


def front(p: Tensor) -> Tensor:
    """Return the solution of Burgers' equation: a front that travels along x."""
    return SPEED - SPEED * (SPEED * (p[:, 0] - 0.25 - SPEED * p[:, 1]) / (2 * VISCOSITY)).tanh()


def of_inverse(u: Function, p: Tensor, coefficients: Tensor) -> Tensor:
    """Return the residual of -a u_xx - b u_yy = f, where f is computed for (a, b) = (0.5, 2)."""
    return u.second @ coefficients + PI**2 * (8.5 * waves(p, 1, 2) + 2 * waves(p, 2, 1))


def two_modes(p: Tensor) -> Tensor:
    """Return the sum of two waves; the first one alone would determine only a + 4 b."""
    return waves(p, 1, 2) + 0.5 * waves(p, 2, 1)


PROBLEMS = {
    "poisson": Equation("u_xx + u_yy = f", lambda p: waves(p, 1, 1), of_poisson, SQUARE),
    "helmholtz": Equation(
        "u_xx + u_yy + (2 pi)^2 u = f", lambda p: waves(p, 2, 2), of_helmholtz, SQUARE, 1 / 16
    ),
    "heat": Equation("u_t = 0.25 u_xx", heat, of_heat, START),
    "burgers": Equation("u_t + u u_x = 0.02 u_xx", front, of_burgers, START),
    "inverse": Equation(
        "-a u_xx - b u_yy = f", two_modes, of_inverse, SQUARE, 1 / 100, (0.5, 2.0), 60
    ),
}
