"""Create optimizers for a task by name, each as a function that takes a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import mpikfac
from mpikfac_apps.lab.equations.task import EquationTask, Solution, by_jets, by_passes

Step = Callable[[float], None]
"""Takes a step; the argument is the fraction of the available time that has been used."""
RATES = {"adam": 0.003, "lbfgs": 1.0, "adam-lbfgs": 0.003, "soap": 0.003, "kfac": 0.0075}
MEMORY = 50  # steps that L-BFGS remembers


def stepper(name: str, task: EquationTask, rate: float | None, comm: mpikfac.comm.Comm) -> Step:
    """Return the step function of the optimizer `name`.

    Collective over: comm.

    Raises:
        ValueError: there are several ranks, but the optimizer supports only one; or `rate` is set,
            but the optimizer has no learning rate.
    """
    if name == "sample-space":
        if rate is not None:
            raise ValueError(f"rate={rate:g} must be null: sample-space has no learning rate")
        return sample_space(task, comm)
    if comm.size > 1:
        raise ValueError(
            f"optimizer={name} runs on one rank, not {comm.size}; use optimizer=sample-space"
        )
    return OPTIMIZERS[name](task, RATES[name] if rate is None else rate)


def sample_space(task: EquationTask, comm: mpikfac.comm.Comm) -> Step:
    """Return the step function of Gauss-Newton in the space of residuals.

    Raises:
        ValueError: there are more points than `SampleSpace` supports.
    """
    most, (inside, given) = mpikfac.lab.SampleSpace.most_residuals, task.counts
    if inside + given > most:
        raise ValueError(
            f"--points {inside} and {given} given values are too many for sample-space, which "
            f"supports {most} in total; pass fewer points, or another --optimizer"
        )
    steps = mpikfac.lab.SampleSpace(task.model, task.terms, also=task.unknown, comm=comm)

    def step(_: float) -> None:
        steps.step()

    return step


def first_order(
    optimizer: torch.optim.Optimizer, task: EquationTask, solution: Solution = by_jets
) -> Step:
    """Return the step function of an optimizer whose learning rate decays linearly to 0."""
    rates = [group["lr"] for group in optimizer.param_groups]

    def step(spent: float) -> None:
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * max(0.0, 1 - spent)
        optimizer.zero_grad()
        task.loss(solution).backward()
        optimizer.step()

    return step


def adam(task: EquationTask, rate: float) -> Step:
    """Return the step function of Adam."""
    return first_order(torch.optim.Adam(task.parameters, lr=rate), task)


def lbfgs(task: EquationTask, rate: float) -> Step:
    """Return the step function of L-BFGS with a line search; a step is up to 20 iterations."""
    optimizer = torch.optim.LBFGS(
        task.parameters, lr=rate, history_size=MEMORY, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        return loss

    def step(_: float) -> None:
        optimizer.step(closure)

    return step


def adam_then_lbfgs(task: EquationTask, rate: float) -> Step:
    """Return a step function that uses Adam for the first half of the time, then L-BFGS."""
    first, second = adam(task, rate), lbfgs(task, RATES["lbfgs"])

    def step(spent: float) -> None:
        if spent < 0.5:
            first(2 * spent)
        else:
            second(spent)

    return step


def soap(task: EquationTask, rate: float) -> Step:
    """Return the step function of SOAP."""
    return first_order(mpikfac.DistributedSOAP(with_coefficients(task), lr=rate), task)


def kfac(task: EquationTask, rate: float) -> Step:
    """Return the step function of K-FAC, whose factors come from ordinary passes, not from jets."""
    optimizer = mpikfac.KFACOptimizer(with_coefficients(task), lr=rate)
    return first_order(optimizer, task, by_passes)


def with_coefficients(task: EquationTask) -> nn.Module:
    """Return a module with all parameters of the task: weights and unknown coefficients."""
    if not task.unknown:
        return task.model
    whole = nn.Module()
    whole.model, whole.coefficients = task.model, task.coefficients
    return whole


OPTIMIZERS: dict[str, Callable[[EquationTask, float], Step]] = {
    **{"adam": adam, "lbfgs": lbfgs, "adam-lbfgs": adam_then_lbfgs, "soap": soap, "kfac": kfac}
}
