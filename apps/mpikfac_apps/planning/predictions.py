"""Predict the steps of strategies by name: a row for each strategy and number of ranks. No MPI."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import mpikfac
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.strategy import (
    Shapes,
    coverage,
    make_plan,
    make_strategy,
    solver_of,
)
from mpikfac_apps.planning.facts import near_root
from mpikfac_apps.planning.options import SGD, PredictionOptions
from mpikfac_apps.problems import models
from mpikfac_apps.text import number

BOUNDED = ("delayed", "event-driven")  # predictions are upper bounds
WIDTH = 96
Row = dict[str, Any]


def predictions(options: PredictionOptions, machine: mpikfac.predict.Machine) -> list[Row]:
    """Return a row for each strategy and number of ranks; without a prediction, the reason.

    Raises:
        ValueError: no strategy can be predicted.
    """
    shapes = both_shapes(options)
    rows = [
        predicted(options, shapes, name, ranks, machine)
        for ranks in dict.fromkeys(options.ranks)
        for name in dict.fromkeys(options.strategy)
    ]
    if all("left_out" in row for row in rows):
        raise ValueError(rows[0]["left_out"])
    return rows


def predicted(
    options: PredictionOptions,
    shapes: dict[bool, Shapes],
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
) -> Row:
    """Return the row of a strategy; without a prediction, the reason.

    Args:
        shapes: of the network, see `both_shapes`.
    """
    job, row = job_of(options), {"strategy": name, "ranks": ranks}
    try:
        plan = plan_of(options, shapes[not name.startswith("sgd")], name, ranks, machine, job)
        found = mpikfac.predict.simulate(plan, machine, job).as_dict()
    except ValueError as error:
        return row | {"left_out": str(error)}
    return row | {"workers": plan.strategy.workers} | found


def job_of(options: PredictionOptions) -> mpikfac.predict.Job:
    """Return the training to predict."""
    return mpikfac.predict.Job(
        options.model,
        options.batch_per_rank,
        options.kfac.lasting_factor_every,
        options.basis_every,
        options.stragglers,
        str(options.kfac.length.source),
        Options(kfac=options.kfac).momentum_of_gradients,
    )


def both_shapes(options: PredictionOptions) -> dict[bool, Shapes]:
    """Return the shapes of the network with K-FAC (True) and without K-FAC (False)."""
    covers = coverage(options.kfac, models.network(options.model).covers)
    covered = models.shapes_of(options.model, options.classes, covers)
    bare = mpikfac.Coverage(skip=[layer.name for layer in covered[0]])
    return {True: covered, False: models.shapes_of(options.model, options.classes, bare)}


def plan_of(
    options: PredictionOptions,
    shapes: Shapes,
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
    job: mpikfac.predict.Job,
) -> mpikfac.plan.Plan:
    """Return the plan of a strategy by name, with messages chosen for the machine.

    Raises:
        ValueError: choices do not fit together, or the machine does not know the network.
    """
    kfac = replace(options.kfac, basis_every=options.basis_every)
    distribution = options.distribution
    first_order = name.startswith("sgd")
    name = "mem-opt" if name == "sgd" else name.removeprefix(SGD)
    change = dict(distribution.change)
    if name == "hybrid" and "workers" not in change and distribution.fraction is None:
        change["workers"] = near_root(ranks)
    distribution = replace(distribution, strategy=name, change=change)
    strategy, settings = make_strategy(distribution, kfac, ranks)
    solver = solver_of(settings)
    if options.solver != "own" and not mpikfac.solvers.SOLVERS[solver].form.vector:
        solver = options.solver
    if first_order:
        strategy, solver = strategy.first_order(), "inverse"
    forms = mpikfac.solvers.forms(solver)
    strategy = mpikfac.predict.tuned(strategy, *shapes, ranks, machine, job, forms)
    return make_plan(kfac, *shapes, ranks, strategy, solver)


def without_factors(options: PredictionOptions) -> bool:
    """Return whether the solver of the options has no factors, and so no intervals."""
    solver = mpikfac.solvers.SOLVERS.get(options.solver)
    return solver is not None and not solver.form.blocks


def machine_in_words(machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines with the machine, and with its numbers that are estimates."""
    words = f"Estimated: {', '.join(machine.estimated)}" if machine.estimated else ""
    lines = textwrap.wrap(words, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [f"Machine: {machine.name}; predicted, not measured", *lines]


def job_in_words(options: PredictionOptions) -> str:
    """Return model, batch, solver and intervals of the runs to predict."""
    words = f"{options.model}, {options.batch_per_rank} images per rank, solver {options.solver}"
    if without_factors(options):
        return f"{words}, without factors"
    return (
        f"{words}, factors every {number(options.kfac.lasting_factor_every, 'step')}, "
        f"bases every {options.basis_every}"
    )
