"""Predict step times of strategies on a machine, for any number of ranks. No MPI.

    mpikfac simulate --model resnet50 --ranks 16,256,4096 --machine v100-edr --basis_every 100

A machine is a file of `mpikfac calibrate`, or a published machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac_apps import cli
from mpikfac_apps.options.options import KfacOptions, Options
from mpikfac_apps.options.strategy import (
    Shapes,
    coverage,
    make_plan,
    make_strategy,
    solver_of,
)
from mpikfac_apps.planning.facts import near_root
from mpikfac_apps.planning.options import SGD, SIMULATE, SimulateOptions
from mpikfac_apps.problems import models
from mpikfac_apps.text import mib, number, show, table

BOUNDED = ("delayed", "event-driven")  # predictions are upper bounds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each number of ranks; return 0, or 2 after one line about wrong options."""
    return cli.run(SIMULATE.program, lambda: predict(SIMULATE.read(argv)))


def predict(options: SimulateOptions) -> int:
    """Print the predictions; return 0.

    Raises:
        ValueError: no strategy can be predicted.
        OSError: a file cannot be read or written.
    """
    machine = mpikfac.predict.load_machine(options.machine)
    rows = predictions(options, machine)
    show(
        [
            heading(options, machine),
            *(section(ranks, rows) for ranks in dict.fromkeys(options.ranks)),
        ]
    )
    if options.json:
        files.write_text(options.json, json.dumps(rows, indent=1) + "\n", named=True)
    return 0


def predictions(options: SimulateOptions, machine: mpikfac.predict.Machine) -> list[dict[str, Any]]:
    """Return a row for each strategy and number of ranks; without a prediction, the reason.

    Raises:
        ValueError: no strategy can be predicted.
    """
    job = mpikfac.predict.Job(
        options.model,
        options.batch_per_rank,
        options.kfac.lasting_factor_every,
        options.basis_every,
        options.stragglers,
        str(options.kfac.length.source),
        Options(kfac=options.kfac).momentum_of_gradients,
    )
    shapes = both_shapes(options)
    rows: list[dict[str, Any]] = []
    for ranks in dict.fromkeys(options.ranks):
        for name in dict.fromkeys(options.strategy):
            row: dict[str, Any] = {"strategy": name, "ranks": ranks}
            try:
                plan = plan_of(
                    options, shapes[not name.startswith("sgd")], name, ranks, machine, job
                )
                row |= {"workers": plan.strategy.workers}
                row |= mpikfac.predict.simulate(plan, machine, job).as_dict()
            except ValueError as error:
                row |= {"left_out": str(error)}
            rows.append(row)
    if all("left_out" in row for row in rows):
        raise ValueError(rows[0]["left_out"])
    return rows


def both_shapes(options: SimulateOptions) -> dict[bool, Shapes]:
    """Return the shapes of the network with K-FAC (True) and without K-FAC (False)."""
    covers = coverage(options.kfac, models.network(options.model).covers)
    covered = models.shapes_of(options.model, options.classes, covers)
    bare = mpikfac.Coverage(skip=[layer.name for layer in covered[0]])
    return {True: covered, False: models.shapes_of(options.model, options.classes, bare)}


def plan_of(
    options: SimulateOptions,
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


def heading(options: SimulateOptions, machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines with the job, the machine and the meaning of the columns."""
    lines = [
        job_in_words(options),
        f"Machine: {machine.name}; predicted, not measured",
        "Milliseconds of a step: mean; plain: a step without new factors; factors: a step with",
        "  new factors; bases: a step with new factors and bases. Parts of the mean: comm, while a",
        "  rank does nothing but communicate, and wait, for slower ranks.",
        "MiB kept by the fullest rank, without model, momenta and averages of lengths; MiB sent by",
        "  a rank in a mean step",
        "* upper bounds: as if no core were free for the background and all factors had changed",
    ]
    if machine.between is None:
        lines.append("The machine is a single node: predictions assume all ranks on a single node")
    if settings := ", ".join(uncounted(options.kfac)):
        lines.append(f"Not counted: {settings}")
    return lines


def job_in_words(options: SimulateOptions) -> str:
    """Return model, batch, solver and intervals of the runs to predict."""
    words = f"{options.model}, {options.batch_per_rank} images per rank, solver {options.solver}"
    solver = mpikfac.solvers.SOLVERS.get(options.solver)
    if solver is not None and not solver.form.blocks:
        return f"{words}, without factors"
    return (
        f"{words}, factors every {number(options.kfac.lasting_factor_every, 'step')}, "
        f"bases every {options.basis_every}"
    )


def uncounted(kfac: KfacOptions) -> Iterator[str]:
    """Yield the work of a step that predictions leave out."""
    if kfac.estimator.fisher in ("sampled", "exact"):
        yield f"the backward passes of fisher={kfac.estimator.fisher}"
    if kfac.length.source == "quadratic":
        yield "the passes of length=quadratic"
    if kfac.damping_adapt:
        yield f"the forward passes of damping_adapt={kfac.damping_adapt}"


def section(ranks: int, rows: list[dict[str, Any]]) -> list[str]:
    """Return the table for a number of ranks."""
    lines = [("strategy", "mean", "plain", "factors", "bases", "comm", "wait", "MiB", "sent MiB")]
    notes = []
    for row in rows:
        if row["ranks"] == ranks and "left_out" in row:
            notes.append(f"{row['strategy']} is left out: {row['left_out']}")
        elif row["ranks"] == ranks:
            steps = [row[kind]["seconds"] for kind in ("mean", "ordinary", "factors", "refresh")]
            times = [*steps, row["mean"]["exposed"], row["mean"]["waiting"]]
            sizes = [row["memory"], row["mean"]["sent"]]
            cells = [f"{time * 1e3:.1f}" for time in times] + list(map(mib, sizes))
            lines.append((row["strategy"] + "*" * (row["strategy"] in BOUNDED), *cells))
            notes += of_clients(row)
    return [number(ranks, "rank"), *table(lines), *notes]


def of_clients(row: dict[str, Any]) -> list[str]:
    """Return a line about asynchronous clients; none for other strategies."""
    if (clients := row["clients"]) is None:
        return []
    return [
        f"{row['strategy']}: {number(clients['number'], 'client')}, {clients['updates']:,.1f} "
        f"updates a second, mean staleness {clients['staleness']:.1f}; a server works "
        f"{clients['busy']:.0%} of the time"
    ]
