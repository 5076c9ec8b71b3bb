"""Predicts step times of strategies on a machine, for any number of ranks. No MPI.

    mpikfac simulate --model resnet50 --ranks 16,256,4096 --machine v100-edr --basis-every 100

A machine is a file that `mpikfac calibrate` wrote, or a published one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac_apps.cli import Parser
from mpikfac_apps.planning.facts import SOLVERS, strategy_of
from mpikfac_apps.problems import models
from mpikfac_apps.text import count, mib, number, show, table

STRATEGIES = ["sgd", *mpikfac.plan.NAMED]  # "sgd" is plain data parallelism
BOUNDED = ("delayed", "event-driven")


def main(argv: list[str] | None = None) -> int:
    """Prints a table for each number of ranks; 2 after printing what is wrong."""
    options = parse(argv)
    try:
        machine = mpikfac.predict.load_machine(options.machine)
        rows = predictions(options, machine)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(f"mpikfac simulate: {error}", file=sys.stderr)
        return 2
    sections = [heading(options, machine)]
    sections += [section(ranks, rows) for ranks in options.ranks]
    show(sections)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked one by one."""
    parser = Parser(prog="mpikfac simulate", description=__doc__.partition("\n")[0])
    add, published = parser.add_argument, ", ".join(mpikfac.predict.published_machines())
    add("--machine", required=True, help=f"a file of mpikfac calibrate, or one of: {published}")
    add("--model", required=True, help=", ".join(models.MODELS))
    add("--classes", type=count, help="10, or 1000 for ImageNet's networks")
    add("--ranks", type=counts, required=True, help="such as 16,64,256")
    add("--strategy", type=names, default=STRATEGIES, help=f"all, or {','.join(STRATEGIES)}")
    add("--solver", choices=(*SOLVERS, "own"), default="inverse", help="own: as each was published")
    add("--batch-per-rank", type=count, default=32, help="images")
    add("--factor-every", type=count, default=1, help="steps")
    add("--basis-every", type=count, default=10, help="steps")
    add("--stragglers", type=float, default=0.0, help="spread of ranks' computing times, as 0.05")
    add("--json", type=Path, help="write the predictions to this file, too")
    return parser.parse_args(argv)


def counts(text: str) -> list[int]:
    """Positive numbers, separated by commas."""
    return list(dict.fromkeys(count(part) for part in text.split(",")))


def names(text: str) -> list[str]:
    """Names of strategies, separated by commas; "all" for all."""
    chosen = STRATEGIES if text == "all" else text.split(",")
    for name in chosen:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(
                f"strategy {name!r} is unknown; try all or some of {', '.join(STRATEGIES)}"
            )
    return chosen


def predictions(
    options: argparse.Namespace, machine: mpikfac.predict.Machine
) -> list[dict[str, Any]]:
    """A row for each strategy and number of ranks; why, where nothing can be said of it.

    Raises:
        ValueError: nothing can be said of any.
    """
    covered = models.shapes_of(options.model, options.classes)
    first_order = models.shapes_of(
        options.model, options.classes, [layer.name for layer in covered[0]]
    )
    job = mpikfac.predict.Job(
        options.model,
        options.batch_per_rank,
        options.factor_every,
        options.basis_every,
        options.stragglers,
    )
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        for name in options.strategy:
            layers, others = first_order if name == "sgd" else covered
            row: dict[str, Any] = {"strategy": name, "ranks": ranks}
            try:
                strategy, solver = strategy_of(name, ranks, options.solver)
                forms = mpikfac.solvers.forms(solver)
                strategy = mpikfac.predict.tuned(
                    strategy, layers, others, ranks, machine, job, forms
                )
                plan = mpikfac.make_plan(layers, ranks, strategy, others, solver)
                row |= {"workers": strategy.workers}
                row |= mpikfac.predict.simulate(plan, machine, job).as_dict()
            except ValueError as error:
                row |= {"left_out": str(error)}
            rows.append(row)
    if all("left_out" in row for row in rows):
        raise ValueError(rows[0]["left_out"])
    return rows


def heading(options: argparse.Namespace, machine: mpikfac.predict.Machine) -> list[str]:
    """What is predicted, in words."""
    lines = [
        f"{options.model}, {options.batch_per_rank} images per rank, "
        f"solver {options.solver}, "
        f"factors every {options.factor_every} steps, bases every {options.basis_every}",
        f"Machine: {machine.name}; predicted, not measured",
        "Milliseconds of a step: the mean; without new factors, with them, with new bases, too;",
        "  of the mean, comm: nothing but communication, wait: for ranks that compute longer.",
        "MiB: kept beside the model, on the fullest rank; sent by a rank in a mean step",
        "* at most: as if no core were free for the background, and all factors had changed",
    ]
    if machine.between is None:
        lines.append("  The machine is one node: so many ranks are taken to be on one, too")
    return lines


def section(ranks: int, rows: list[dict[str, Any]]) -> list[str]:
    """The table for one number of ranks."""
    lines = [("strategy", "mean", "plain", "factors", "bases", "comm", "wait", "MiB", "sent MiB")]
    left_out = []
    for row in rows:
        if row["ranks"] == ranks and "left_out" in row:
            left_out.append(f"{row['strategy']} is left out: {row['left_out']}")
        elif row["ranks"] == ranks:
            steps = [row[kind]["seconds"] for kind in ("mean", "ordinary", "factors", "refresh")]
            times = [*steps, row["mean"]["exposed"], row["mean"]["waiting"]]
            sizes = [row["memory"], row["mean"]["sent"]]
            cells = [f"{time * 1e3:.1f}" for time in times] + list(map(mib, sizes))
            lines.append((row["strategy"] + "*" * (row["strategy"] in BOUNDED), *cells))
    return [number(ranks, "rank"), *table(lines), *left_out]
