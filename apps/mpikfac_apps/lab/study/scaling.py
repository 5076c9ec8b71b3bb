"""Predict the time to a target on many ranks: measured steps times predicted seconds per step.

The number of steps for a batch size does not depend on the number of ranks that share the batch, so
it can be measured on few ranks. With a machine file, the time of a step can be predicted for any
number of ranks. Each optimizer uses the batch with the shortest time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean

import mpikfac
from mpikfac_apps.lab.study.results import Measured, other_estimator
from mpikfac_apps.lab.study.seeds import SeedMean, mean_of
from mpikfac_apps.lab.study.spec import Cell, inv_update_steps, plan_of
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import job_of, make_strategy, preconditioner_of, training_ranks

# Predictions of the first two are upper bounds; with the third, not all ranks share the batch.
LEFT_OUT = ("stale-inverse", "event-driven", "curvature-servers")
STRATEGIES = tuple(
    name for name, entry in mpikfac.plan.NAMED.items() if entry.same and name not in LEFT_OUT
)
"""Strategies with COMM-OPT's results, so that the measured steps are valid for all of them."""


@dataclass(frozen=True)
class Steps:
    """The steps that an optimizer needs to reach the target test result with a given batch size.

    Attributes:
        cell: a cell of the variant that needs the fewest steps.
        steps: the mean number of steps over the variant's seeds.
    """

    cell: Measured
    steps: SeedMean

    @property
    def optimizer(self) -> str:
        """The optimizer's name, as in the options."""
        return self.cell.cell.options.optimizer

    @property
    def kind(self) -> str:
        """The optimizer's name, with the strategy's name if the strategy changes results."""
        options = self.cell.cell.options
        label = f"kfac ({options.distribution.strategy})"
        return label if other_estimator(options) else self.optimizer

    @property
    def batch(self) -> int:
        """The number of images per step across all ranks."""
        return self.cell.cell.options.step_batch


@dataclass(frozen=True)
class Forecast:
    """The predicted time to the target on a number of ranks, with the best measured batch.

    Attributes:
        name: the optimizer and, for K-FAC, the strategy.
        step: the predicted time of a step, in seconds.
    """

    name: str
    ranks: int
    measured: Steps
    step: float

    @property
    def seconds(self) -> float:
        """The seconds to the target."""
        return self.measured.steps.mean * self.step


def steps_to_target(cells: Sequence[Measured], target: float) -> list[Steps]:
    """Return the fewest steps to the target for each kind of optimizer and batch size.

    They are in the order of the cells. A variant counts if all of its seeds are complete and
    reached the target. Of the variants with the same kind and batch size, only those with the most
    seeds count.
    """
    variants: dict[str, list[Measured]] = {}
    for cell in cells:
        variants.setdefault(f"{cell.cell.variant} on {cell.cell.ranks}", []).append(cell)
    best: dict[tuple[str, int], Steps] = {}
    for seeds in variants.values():
        reached = [cell.curve.reached(target) if cell.complete else None for cell in seeds]
        mean = mean_of(when.steps for when in reached if when)
        if mean is None or None in reached:
            continue
        steps = Steps(seeds[0], mean)
        key = steps.kind, steps.batch
        if key not in best or _order(steps) < _order(best[key]):
            best[key] = steps
    return list(best.values())


def _order(steps: Steps) -> tuple[int, float]:
    return -steps.steps.count, steps.steps.mean


def efficient_batches(steps: Sequence[Steps]) -> dict[str, int]:
    """Return, for each kind of optimizer, the largest batch size that is still efficient.

    It needs at most twice as many images to the target as the best batch size. This is the critical
    batch of [McCandlish et al. 2018]. Kinds with a single batch size are left out.
    """
    images: dict[str, dict[int, float]] = {}
    for each in steps:
        images.setdefault(each.kind, {})[each.batch] = each.batch * each.steps.mean
    return {
        kind: max(batch for batch, seen in by_batch.items() if seen <= 2 * min(by_batch.values()))
        for kind, by_batch in images.items()
        if len(by_batch) > 1
    }


def forecasts(
    machine: mpikfac.predict.Machine, ranks: Sequence[int], cells: Sequence[Measured], target: float
) -> list[Forecast]:
    """Return the shortest predicted time to the target by optimizer, strategy and rank count.

    There is no entry if no measured batch can be divided among the ranks, or if the machine has no
    times for the network.
    """
    best: dict[tuple[int, str], Forecast] = {}
    slower = optimizer_seconds(cells)
    for count in ranks:
        for measured in steps_to_target(cells, target):
            for name, step in _steps_at(machine, count, measured, slower):
                candidate = Forecast(name, count, measured, step)
                current = best.setdefault((count, name), candidate)
                best[count, name] = min(current, candidate, key=lambda forecast: forecast.seconds)
    return list(best.values())


def optimizer_seconds(cells: Sequence[Measured]) -> dict[str, float]:
    """Return the mean time of the optimizer stage of traced steps, in seconds, by optimizer."""
    seconds: dict[str, list[float]] = {}
    for cell in cells:
        if cell.complete and cell.breakdown:
            times = seconds.setdefault(cell.cell.options.optimizer, [])
            times.append(cell.breakdown["optimizer"])
    return {optimizer: fmean(times) for optimizer, times in seconds.items()}


def _steps_at(
    machine: mpikfac.predict.Machine, ranks: int, measured: Steps, slower: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Yield the name and the predicted step time of each of an optimizer's strategies."""
    options, optimizer = measured.cell.cell.options, measured.optimizer
    if measured.batch % ranks:
        return
    if measured.kind == "kfac":
        for strategy in STRATEGIES:
            with suppress(ValueError):  # the strategy does not support the number of ranks
                chosen = distributed(measured.cell.cell, strategy)
                yield f"kfac ({strategy})", _step(machine, ranks, chosen)
        return
    with suppress(ValueError):  # the machine file lacks the network
        step = _step(machine, ranks, options)
        if slower.keys() >= {optimizer, "sgd"}:
            network = machine.network(options.model, options.step_batch // ranks)
            step += network.optimizer * (slower[optimizer] / slower["sgd"] - 1)
        yield measured.kind, step


def distributed(cell: Cell, strategy: str) -> Options:
    """Return a cell's options with a different strategy, but the cell's own preconditioner."""
    options = cell.options
    distribution, training = options.distribution, training_ranks(options, cell.ranks)
    _, settings = make_strategy(distribution, options.kfac, training)
    settings = {**settings, "preconditioner": preconditioner_of(settings)}
    return replace(
        options, distribution=distribution.renamed(strategy), kfac=replace(options.kfac, **settings)
    )


def _step(machine: mpikfac.predict.Machine, ranks: int, options: Options) -> float:
    """Return the predicted time per step, averaged over steps, in seconds.

    Raises:
        ValueError: the options are invalid for the number of ranks, or the machine has no times
            for the network.
    """
    job = job_of(options, ranks, inv_update_steps(options, ranks))
    return mpikfac.predict.simulate(plan_of(options, ranks), machine, job).mean.seconds
