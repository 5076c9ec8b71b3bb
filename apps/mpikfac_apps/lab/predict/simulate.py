"""Predict step times of strategies on any number of ranks of a machine. Runs without MPI.

    mpikfac simulate --model resnet50 --ranks 16,256,4096 --machine v100-edr --inv_update_steps 100

A machine is a file written by `mpikfac calibrate`, or the name of a published machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import mpikfac
from mpikfac import files
from mpikfac_apps import cli
from mpikfac_apps.lab.predict import search
from mpikfac_apps.lab.predict.options import SIMULATE, SimulateOptions
from mpikfac_apps.lab.predict.predictions import (
    BOUNDED,
    Row,
    intervals_in_words,
    job_in_words,
    machine_in_words,
    predictions,
)
from mpikfac_apps.text import mib, number, show, table


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table for each number of ranks.

    Return 0, or print a one-line error and return 2 if the options are invalid.
    """
    return cli.run(SIMULATE.program, lambda: predict(SIMULATE.read(argv)))


def predict(options: SimulateOptions) -> int:
    """Print the predictions; return 0.

    Raises:
        ValueError: no strategy can be predicted.
        OSError: a file cannot be read or written.
    """
    if options.picture and not options.search:
        raise ValueError(f"picture={options.picture} needs search=true")
    machine = mpikfac.predict.load_machine(options.machine)
    rows = search.search(options, machine) if options.search else predictions(options, machine)
    head, page = (search.heading, search.section) if options.search else (heading, section)
    show([head(options, machine), *(page(ranks, rows) for ranks in dict.fromkeys(options.ranks))])
    if options.picture:
        search.draw(rows, options.picture)
    if options.json:
        files.write_text(options.json, json.dumps(rows, indent=1) + "\n", named=True)
    return 0


def heading(options: SimulateOptions, machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines that describe the job, the machine and the columns of the tables."""
    lines = [
        job_in_words(options),
        *machine_in_words(machine),
        "Milliseconds of a step: mean; plain: a step without new factors; factors: a step with",
        "  new factors; bases: a step with new factors and bases. Parts of the mean: comm, when a",
        "  rank does nothing but communicate, and wait, when it waits for slower ranks.",
        "Maximum MiB kept by a rank, without model, momenta and grafting; MiB sent by",
        "  a rank in a mean step",
        "sgd: overlaps its messages with the backward pass if that is faster",
        "* upper bounds, as if no core were free for background work and all factors had changed",
    ]
    if machine.between is None:
        lines.append("The machine is a single node, so predictions assume all ranks on one node")
    if settings := ", ".join(uncounted(options)):
        lines.append(f"Not counted: {settings}")
    return lines


def uncounted(options: SimulateOptions) -> Iterator[str]:
    """Yield descriptions of the work in a step that predictions leave out."""
    kfac = options.kfac
    if kfac.estimator.fisher_type in ("mc", "type-2"):
        yield f"the backward passes of fisher_type={kfac.estimator.fisher_type}"
    if kfac.grafting.needs_batch:
        yield f"the passes of grafting={kfac.grafting.name}"
    if kfac.damping_adapt:
        yield f"the forward passes of damping_adapt={kfac.damping_adapt}"


def section(ranks: int, rows: list[Row]) -> list[str]:
    """Return the table of predictions for a number of ranks, and notes."""
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
            mark = "*" if row["strategy"] in BOUNDED else ""
            lines.append((row["strategy"] + mark, *cells))
            notes += of_clients(row)
    same = [row for row in rows if row["ranks"] == ranks]
    return [number(ranks, "rank"), *intervals_in_words(same), *table(lines), *notes]


def of_clients(row: Row) -> list[str]:
    """Return a line about a strategy's asynchronous clients; no line if it has none."""
    if (clients := row["clients"]) is None:
        return []
    return [
        f"{row['strategy']}: {number(clients['number'], 'client')}, {clients['updates']:,.1f} "
        f"updates per second, mean staleness {clients['staleness']:.1f}; a server is busy "
        f"{clients['busy']:.0%} of the time"
    ]
