"""Solve a differential equation with a network, and print the error of the solution.

    mpikfac equations --problem burgers --points 2000 --width 64
    mpirun -n 4 mpikfac equations --problem inverse --seconds 20

The exact solutions are known. The time is the CPU time that rank 0 spends on steps, excluding
evaluations of the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import mpikfac
from mpikfac_apps.cli import write_picture
from mpikfac_apps.guard.ranks import run_on_ranks
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.lab.equations.optimizers import Step, stepper
from mpikfac_apps.lab.equations.options import EQUATIONS, EquationsOptions
from mpikfac_apps.lab.equations.problems import PROBLEMS
from mpikfac_apps.lab.equations.task import GRID, EquationTask, grid
from mpikfac_apps.place import share_cores

LINES = 10


class Solved(NamedTuple):
    """The progress of solving an equation.

    Attributes:
        seconds: the CPU seconds that rank 0 has spent on steps.
        loss: half the weighted mean of squared residuals.
        error: the relative L2 error of the solution.
        coefficients: the estimates of the equation's unknown coefficients.
    """

    seconds: float
    steps: int
    loss: float
    error: float
    coefficients: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Solve an equation, and print the progress; return 0.

    Collective over: world.

    Raises:
        SystemExit: with code 2, after a single line about an error that the user can correct.
    """
    return run_on_ranks(lambda _: EQUATIONS.read(argv), equations)


def equations(comm: mpikfac.comm.Comm, options: EquationsOptions, watchdog: Watchdog) -> int:
    """Solve an equation, print the progress on rank 0, and draw the solution; return 0.

    Collective over: comm.
    """
    share_cores(comm, None)
    with mpikfac.comm.together(comm, "equations"):
        task = EquationTask(
            PROBLEMS[options.problem],
            *(options.points, options.width, options.seed, comm.rank, comm.size),
        )
        step = stepper(options.optimizer, task, options.rate, comm)

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, flush=True)

    weights = sum(parameter.numel() for parameter in task.model.parameters())
    inside, given = task.counts
    say(f"{task.equation.text}; {inside:,} points, {given:,} values, {weights:,} weights")
    say(f"{'seconds':>8} {'steps':>7} {'loss':>9} {'L2 error':>9}")
    for at in solve(task, step, options.seconds, comm, lambda step: watchdog.enter("step", step)):
        found = "".join(f"  {value:.5f}" for value in at.coefficients)
        say(f"{at.seconds:8.1f} {at.steps:7} {at.loss:9.1e} {at.error:9.1e}{found}")
    with mpikfac.comm.together(comm, f"writing {options.picture}"):
        if comm.rank == 0 and options.picture is not None:
            draw(task, options.picture)
    return 0


def solve(
    task: EquationTask,
    step: Step,
    seconds: float,
    comm: mpikfac.comm.Comm,
    progress: Callable[[int], None] = lambda _: None,
    lines: int = LINES,
) -> Iterator[Solved]:
    """Take steps; yield the progress at equal intervals of CPU time, `lines` times in total.

    Collective over: comm.

    Args:
        seconds: the CPU time in total, as measured on rank 0.
        progress: called before each step, with the number of steps taken so far.
    """
    spent, steps = 0.0, 0
    for line in range(1, lines + 1):
        while comm.bcast(spent < seconds * line / lines):
            progress(steps)
            start = time.process_time()
            step(min(1.0, spent / seconds))
            spent, steps = spent + time.process_time() - start, steps + 1
        (loss,) = mpikfac.comm.summed(comm, [task.tested_loss()])
        yield Solved(spent, steps, loss, task.error(), tuple(task.coefficients.tolist()))


@torch.no_grad()
def draw(task: EquationTask, path: Path) -> None:
    """Draw the network's solution and its error over the unit square."""
    from matplotlib.figure import Figure

    points = grid()
    found, exact = task.model(points)[:, 0], task.equation.exact(points)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    second = "t" if len(task.equation.sides) == 3 else "y"
    solution, error = figure.subplots(ncols=2)
    largest = (found - exact).abs().max().item()
    signed = {"cmap": "coolwarm", "vmin": -largest, "vmax": largest}
    for panel, values, name, looks in (
        (solution, found, "u", {"cmap": "viridis"}),
        (error, found - exact, "u of the network - exact u", signed),
    ):
        square = values.view(GRID, GRID).T.numpy()
        image = panel.imshow(square, origin="lower", extent=(0, 1, 0, 1), **looks)
        panel.set(xlabel="x", ylabel=second)
        figure.colorbar(image, ax=panel, label=name)
    solution.set_title(f"solution of {task.equation.text}", fontsize="medium")
    error.set_title("error", fontsize="medium")
    write_picture(figure, path)
