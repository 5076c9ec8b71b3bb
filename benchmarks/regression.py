"""Compare relative dampings of K-FAC, and Adam, on smooth regressions by small networks.

    OMP_NUM_THREADS=1 python benchmarks/regression.py
    python benchmarks/regression.py --known

Three networks solve differential equations (PINNs), and one learns a function with its slopes:
their losses contain derivatives of the network with respect to its inputs. Two learn by values
alone. Batches are full, rates decay linearly to 0, and all other options are the library's
defaults. Results are kept in `results/regression.jsonl` next to this file, one line per run, and
are not repeated. `--known` prints the tables of the known runs: the final loss, the error compared
to the exact function, and CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.text import table

Job = tuple[str, str, int]
"""Problem, setting and seed."""
Function = Callable[[Tensor], Tensor]
"""From points `[n, inputs]` to values `[n, outputs]`."""

RESULTS = Path(__file__).parent / "results" / "regression.jsonl"
STEPS = 1000
SETTINGS = {
    **{f"damping {share:g}": ("kfac", share, STEPS) for share in (0.01, 0.1, 1.0, 10.0)},
    **{f"Adam {rate:g}": ("adam", rate, STEPS) for rate in (0.001, 0.01)},
    "Adam 0.01, 2,000 steps": ("adam", 0.01, 2 * STEPS),
}
"""Optimizer, its relative damping or rate, and steps."""
INSIDE, BORDER, TESTED = 256, 96, 2000
WIDTH, DEPTH = 32, 3
VISCOSITY = 0.02
CURVE = 64  # values of a curve


@dataclass(frozen=True)
class Problem:
    """A regression.

    Attributes:
        network: made after the seed is set.
        loss: of the network at its training points.
        error: of the network's values against the exact function, relative, at other points.
    """

    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    error: Callable[[nn.Module], Tensor]


def main() -> int:
    """Run all missing runs, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    if options.known:
        report(known())
        return 0
    torch.set_num_threads(1)
    logging.getLogger("mpikfac").setLevel(logging.ERROR)  # most of the losses are warned of
    for seed, problem, setting in itertools.product(
        options.seeds, options.problems, options.settings
    ):
        if (problem, setting, seed) not in known():
            keep((problem, setting, seed), train(problem, setting, seed))
    return 0


def train(name: str, setting: str, seed: int) -> dict[str, float]:
    """Train; return the mean loss of the last 20 steps, the error and the CPU seconds."""
    torch.manual_seed(seed)
    problem = PROBLEMS[name]()
    network = problem.network()
    kind, number, steps = SETTINGS[setting]
    optimizer = optimizer_of(kind, network, number)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    losses, start = [], time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = problem.loss(network)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.process_time() - start
    error = problem.error(network).item()
    return {"loss": torch.stack(losses[-20:]).mean().item(), "error": error, "seconds": seconds}


def optimizer_of(kind: str, network: nn.Module, number: float) -> torch.optim.Optimizer:
    """Return Adam at a rate, or K-FAC with a relative damping."""
    if kind == "adam":
        return torch.optim.Adam(network.parameters(), lr=number)
    return mpikfac.KFACOptimizer(network, damping=mpikfac.Damping(relative=number))


# -- problems --------------------------------------------------------------------------------------


def tanh_network(*widths: int) -> Callable[[], nn.Module]:
    """Return a maker of linear layers with tanh in between."""

    def network() -> nn.Module:
        pairs = itertools.pairwise(widths)
        layers = [module for pair in pairs for module in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    return network


def slopes(values: Tensor, points: Tensor) -> Tensor:
    """Return the derivatives of `[n]` values by their points, with a graph of their own."""
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def relative_error(found: Tensor, exact: Tensor) -> Tensor:
    """Return the norm of the difference over the norm of the exact values."""
    return ((found - exact).norm() / exact.norm()).detach()


def equation(residual: Callable[..., Tensor], exact: Function, border: Tensor) -> Problem:
    """Return a PINN: `residual(points, u, slopes, second derivatives)` is 0 inside the square.

    Args:
        exact: the solution, known on the border alone.
        border: points `[n, 2]` with given values.
    """
    inside, tested = torch.rand(INSIDE, 2, requires_grad=True), torch.rand(TESTED, 2)
    given = exact(border)

    def loss(network: nn.Module) -> Tensor:
        u = network(inside)[:, 0]
        first = slopes(u, inside)
        second = torch.stack([slopes(first[:, axis], inside)[:, axis] for axis in (0, 1)], 1)
        misfit = (network(border)[:, 0] - given).square().mean()
        return residual(inside, u, first, second).square().mean() + 10 * misfit

    return Problem(
        tanh_network(2, *[WIDTH] * DEPTH, 1),
        loss,
        lambda network: relative_error(network(tested)[:, 0], exact(tested)),
    )


def edges(*sides: tuple[int, float]) -> Tensor:
    """Return points on sides of the unit square; a side is an axis and its constant value."""
    points = [torch.rand(BORDER // len(sides), 2) for _ in sides]
    for part, (axis, value) in zip(points, sides):
        part[:, axis] = value
    return torch.cat(points)


def burgers() -> Problem:
    """Return Burgers' equation in (x, t): a front that travels."""

    def exact(points: Tensor) -> Tensor:
        x, t = points.T
        return 0.5 - 0.5 * torch.tanh((x - 0.25 - 0.5 * t) / (4 * VISCOSITY))

    def residual(points: Tensor, u: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return first[:, 1] + u * first[:, 0] - VISCOSITY * second[:, 0]

    return equation(residual, exact, edges((0, 0.0), (0, 1.0), (1, 0.0)))


def poisson() -> Problem:
    """Return Poisson's equation in (x, y)."""

    def exact(points: Tensor) -> Tensor:
        return (math.pi * points).sin().prod(1)

    def residual(points: Tensor, u: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return second.sum(1) + 2 * math.pi**2 * exact(points)

    return equation(residual, exact, edges((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)))


def heat() -> Problem:
    """Return the equation of heat in (x, t)."""

    def exact(points: Tensor) -> Tensor:
        x, t = points.T
        return (-0.2 * math.pi**2 * t).exp() * (math.pi * x).sin()

    def residual(points: Tensor, u: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return first[:, 1] - 0.2 * second[:, 0]

    return equation(residual, exact, edges((0, 0.0), (0, 1.0), (1, 0.0)))


def waves(points: Tensor) -> Tensor:
    """Return a smooth function of two coordinates, `[n]`."""
    x, y = points.T
    return (6 * x).sin() * (4 * y).cos() + (-8 * ((x - 0.5) ** 2 + (y - 0.3) ** 2)).exp()


def values_alone() -> Problem:
    """Return a regression of a smooth function by its values."""
    points, tested = torch.rand(2 * INSIDE, 2), torch.rand(TESTED, 2)
    return Problem(
        tanh_network(2, *[WIDTH] * DEPTH, 1),
        lambda network: (network(points)[:, 0] - waves(points)).square().mean(),
        lambda network: relative_error(network(tested)[:, 0], waves(tested)),
    )


def values_and_slopes() -> Problem:
    """Return a regression of a smooth function by its values and its slopes."""
    points, tested = torch.rand(INSIDE, 2, requires_grad=True), torch.rand(TESTED, 2)
    (given,) = torch.autograd.grad(waves(points).sum(), points)

    def loss(network: nn.Module) -> Tensor:
        u = network(points)[:, 0]
        misfit = (slopes(u, points) - given).square().sum(1).mean()
        return (u - waves(points).detach()).square().mean() + 0.1 * misfit

    return Problem(
        tanh_network(2, *[WIDTH] * DEPTH, 1),
        loss,
        lambda network: relative_error(network(tested)[:, 0], waves(tested)),
    )


def curves() -> Problem:
    """Return an autoencoder of smooth curves, sums of waves with four random numbers each."""
    place = torch.linspace(0, 1, CURVE)

    def drawn(count: int) -> Tensor:
        height, phase, fine, shift = torch.rand(4, count, 1)
        wave = (2 * math.pi * (place + phase)).sin() * (0.5 + height)
        return wave + 0.5 * fine * (6 * math.pi * (place + shift)).sin()

    learned, tested = drawn(INSIDE), drawn(INSIDE)
    return Problem(
        tanh_network(CURVE, 64, 32, 8, 32, 64, CURVE),
        lambda network: (network(learned) - learned).square().mean(),
        lambda network: relative_error(network(tested), tested),
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{"Burgers": burgers, "Poisson": poisson, "heat": heat},
    **{"slopes": values_and_slopes, "values": values_alone, "curves": curves},
}


# -- results ---------------------------------------------------------------------------------------


def keep(job: Job, result: Mapping[str, float]) -> None:
    """Append a result to the file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"job": job, "result": result}) + "\n")
    print(*job, result, flush=True)


def known() -> dict[Job, dict[str, float]]:
    """Return all known results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {tuple(row["job"]): row["result"] for row in map(json.loads, lines)}


def report(results: Mapping[Job, Mapping[str, float]]) -> None:
    """Print medians over seeds: losses, errors and seconds of each problem by setting."""
    for measure in ("loss", "error", "seconds"):
        rows = [(measure, *SETTINGS)]
        for problem in PROBLEMS:
            cells = (middle(results, problem, setting, measure) for setting in SETTINGS)
            rows.append((problem, *cells))
        print("\n".join(table(rows)), end="\n\n")


def middle(
    results: Mapping[Job, Mapping[str, float]], problem: str, setting: str, measure: str
) -> str:
    """Return the median over seeds as a text."""
    runs = [result[measure] for job, result in results.items() if job[:2] == (problem, setting)]
    return f"{statistics.median(runs):.2g}" if runs else ""


if __name__ == "__main__":
    sys.exit(main())
