"""A network that solves an equation, its training points, and its residuals at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.lab.equations.problems import Equation, Function

GRID = 64  # points per axis at which the error is measured
DEPTH = 3
Solution = Callable[[nn.Module, Tensor], Function]
"""Returns a network's values at points, with the first and second derivatives."""


class Derivatives(NamedTuple):
    """Values `[points]` of a function, and its first and second derivatives `[points, 2]`."""

    value: Tensor
    first: Tensor
    second: Tensor


def by_jets(model: nn.Module, points: Tensor) -> Function:
    """Return the network's values, with derivatives computed in forward mode."""
    found: Function = model(mpikfac.lab.jet(points))
    return found


def by_passes(model: nn.Module, points: Tensor) -> Function:
    """Return the network's values, with derivatives computed by nested backward passes."""
    points = points.clone().requires_grad_()
    value = model(points)[:, 0]
    (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    second = [
        torch.autograd.grad(first[:, axis].sum(), points, create_graph=True)[0][:, axis]
        for axis in range(points.shape[1])
    ]
    return Derivatives(value, first, torch.stack(second, 1))


class EquationTask:
    """A network in float64 that is trained to solve an equation.

    Args:
        points: the number of points at which the equation has to hold, on all ranks.
        rank, size: the rank and the number of ranks; each rank uses every `size`-th point.

    Attributes:
        model: the network; its weights are the same on all ranks.
        coefficients: the unknown coefficients, all 1 at the start; empty if there are none.
    """

    def __init__(
        self, equation: Equation, points: int, width: int, seed: int, rank: int = 0, size: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.equation = equation
        self.model = network(width, generator)
        self.coefficients = nn.Parameter(torch.ones(len(equation.coefficients)).double())
        inside = torch.rand(points, 2, generator=generator).double()
        given = given_points(equation, points // 3, generator)
        self.counts = len(inside), len(given)
        self._inside, self._given = inside[rank::size], given[rank::size]
        self._values = equation.exact(self._given)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights and the unknown coefficients."""
        return [*self.model.parameters(), *self.unknown]

    @property
    def unknown(self) -> list[nn.Parameter]:
        """The unknown coefficients, if there are any."""
        return [self.coefficients] if len(self.coefficients) else []

    @property
    def terms(self) -> list[mpikfac.lab.Term]:
        """The residuals of the equation and of the given values, at this rank's points."""
        return [
            mpikfac.lab.Term(self.of_equation, self._inside, self.equation.weight),
            mpikfac.lab.Term(self.of_values, (self._given, self._values)),
        ]

    def of_equation(self, model: nn.Module, points: Tensor, solution: Solution = by_jets) -> Tensor:
        """Return the residuals of the equation, `[points]`."""
        return self.equation.residual(solution(model, points), points, self.coefficients)

    def of_values(self, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        """Return the network's outputs minus the given values, `[points]`."""
        points, values = given
        return model(points)[:, 0] - values

    def loss(self, solution: Solution = by_jets) -> Tensor:
        """Return this rank's term of the loss, half the weighted mean of squared residuals."""
        equation = self.of_equation(self.model, self._inside, solution).square().sum()
        values = self.of_values(self.model, (self._given, self._values)).square().sum()
        inside, given = self.counts
        return self.equation.weight * equation / (2 * inside) + values / (2 * given)

    @torch.no_grad()
    def tested_loss(self) -> float:
        """Return this rank's term of the loss in evaluation mode, so optimizers record nothing."""
        self.model.eval()
        loss = self.loss().item()
        self.model.train()
        return loss

    @torch.no_grad()
    def error(self) -> float:
        """Return the relative L2 error of the network's solution, on a grid of cell centres."""
        points = grid()
        exact = self.equation.exact(points)
        return ((self.model(points)[:, 0] - exact).norm() / exact.norm()).item()


def network(width: int, generator: torch.Generator) -> nn.Sequential:
    """Return a network with two inputs, one output, and tanh between linear layers."""
    widths = [2, *[width] * DEPTH, 1]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:]):
        layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        for parameter in layer.parameters():  # as torch does, but with the given generator
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def given_points(equation: Equation, count: int, generator: torch.Generator) -> Tensor:
    """Return the points with given values: about `count` on sides, and those inside the square."""
    parts = [
        torch.rand(max(1, count // len(equation.sides)), 2, generator=generator)
        for _ in equation.sides
    ]
    for part, (axis, coordinate) in zip(parts, equation.sides):
        part[:, axis] = coordinate
    return torch.cat([*parts, torch.rand(equation.inside, 2, generator=generator)]).double()


def grid() -> Tensor:
    """Return the centres of `GRID` x `GRID` cells, `[cells, 2]`, with x before y or t."""
    centres = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    return torch.cartesian_prod(centres, centres)
