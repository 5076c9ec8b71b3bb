"""Compare planned and counted bytes of embedding rows, and predicted and measured steps of a DLRM.

    bash jobs/emulated_cluster.sh up 4 --rate 1gbit
    bash jobs/emulated_cluster.sh run mpikfac calibrate --out 1gbit.json \
        --model resnet20
    bash jobs/emulated_cluster.sh run python -m mpi4py benchmarks/recommendation.py \
        --machine 1gbit.json --json recommendation.json

Clicks are generated, in Criteo's format. SGD and K-FAC train the layers alternately. A step is the
mean over an interval of a refresh, the median over rounds; so is a stage, of the rank that comes
last. A prediction adds the messages of the trainer's plan and those of the tables to the seconds in
which each rank trains independently on its shard, all ranks at once, as hosts share the cores of
this machine. A rank that trains independently owns all tables, and decomposes all factors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import mpikfac
from mpikfac.predict.costs import message_seconds
from mpikfac_apps.programs.options import Kfac
from mpikfac_apps.recommendation.tables import BACKWARD, FORWARD
from mpikfac_apps.recommendation.train import Recommendation, RecommendationOptions
from mpikfac_apps.text import table

ROWS = (FORWARD, BACKWARD)
INTERVAL = 10  # steps from one decomposition to the next
HEAD = ("layers by", "bytes planned", "counted", "rows ms", "predicted", "messages", "predicted")


def main() -> None:
    """Print the table and write the figures.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True, help="a file of mpikfac calibrate")
    parser.add_argument("--batch", type=int, default=256, help="clicks of a rank")
    parser.add_argument("--width", type=int, default=64, help="numbers in a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = mpikfac.world()
    machine = mpikfac.predict.load_machine(options.machine)
    with tempfile.TemporaryDirectory() as folder:
        data = drawn(Path(folder) / "drawn.tsv", 2 * options.batch * comm.size)
        made = {name: make(comm, name, options, data) for name in ("sgd", "kfac")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, (work, alone) in made.items():
            found[name].append(interval(comm, work) | {"computing": step_seconds(comm, alone)})
    rows = [row(comm, name, work, found[name], machine) for name, (work, _) in made.items()]
    if comm.rank == 0:
        report(options, comm.size, rows)


def drawn(path: Path, count: int) -> str:
    """Write rows of Criteo's format, the same on all ranks; return the path."""
    draws = np.random.default_rng(0)
    labels, counts = draws.integers(0, 2, (count, 1)), draws.integers(0, 100, (count, 13))
    words = [[f"{word:08x}" for word in row] for row in draws.integers(0, 2**32, (count, 26))]
    numbers = np.concatenate([labels, counts], 1).tolist()
    lines = ["\t".join([*map(str, some), *row]) for some, row in zip(numbers, words)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def make(
    comm: mpikfac.comm.Comm, name: str, options: argparse.Namespace, data: str
) -> tuple[Recommendation, Recommendation]:
    """Return the training of all ranks together, and of the rank alone on its share.

    Collective over: world.
    """

    def of(some: mpikfac.comm.Comm) -> Recommendation:
        torch.manual_seed(0)
        kfac = Kfac(factor_update_steps=1, inv_update_steps=INTERVAL)
        asked = RecommendationOptions(
            data=data,
            tested=0.5,
            batch=options.batch * some.size,
            width=options.width,
            optimizer=name,
            kfac=kfac,
        )
        return Recommendation(some, asked, torch.device("cpu"))

    works = of(comm), of(comm.Split(comm.rank))
    for work in works:
        for step in range(INTERVAL):
            work.step(step)
    return works


def step_seconds(comm: mpikfac.comm.Comm, work: Recommendation) -> float:
    """Return the seconds of a step, over an interval.

    Collective over: comm.
    """
    first = work.trainer.steps
    comm.Barrier()
    start = time.perf_counter()
    for step in range(first, first + INTERVAL):
        work.step(step)
    comm.Barrier()
    return (time.perf_counter() - start) / INTERVAL


def interval(comm: mpikfac.comm.Comm, work: Recommendation) -> dict[str, float]:
    """Return the seconds of a step, of its rows and of its other messages, and the bytes of rows.

    Collective over: comm.
    """
    trace = work.trainer.trace
    trace.clear()
    seconds = step_seconds(comm, work)
    stages = {stage: trace.seconds[stage] / INTERVAL for stage in mpikfac.trace.COMMUNICATION}
    everyone = comm.allgather(stages)
    last = {stage: min(stages[stage] for stages in everyone) for stage in stages}
    sent = sum(trace.sent[stage] for stage in ROWS) / INTERVAL
    rows = sum(last[stage] for stage in ROWS)
    return {
        "step": seconds,
        "rows": rows,
        "messages": sum(last.values()) - rows,
        "bytes": mpikfac.comm.summed(comm, [sent])[0],
    }


def row(
    comm: mpikfac.comm.Comm,
    name: str,
    work: Recommendation,
    found: list[dict[str, float]],
    machine: mpikfac.predict.Machine,
) -> dict[str, Any]:
    """Return the measured and predicted numbers of an optimizer.

    Collective over: comm.
    """
    plan, rank = work.trainer.plan, comm.rank
    _, shares = work.share_of(torch.arange(work.examples_per_step))
    of_rows = work.tables.messages(shares)
    kinds = [(True, step == 0) for step in range(INTERVAL)]
    of_steps = [one for kind in kinds for one in plan.messages(rank, *kind, clip=False)]

    def seconds(messages: list[mpikfac.plan.Message]) -> float:
        own = sum(message_seconds(message, plan, rank, machine) for message in messages)
        return max(comm.allgather(own))

    rows, messages = seconds(of_rows), seconds(of_steps) / INTERVAL
    measured = {key: median(one[key] for one in found) for key in found[0]}
    planned = mpikfac.comm.summed(comm, [float(sum(message.bytes for message in of_rows))])[0]
    return {
        "layers by": name,
        **measured,
        "planned bytes": planned,
        "predicted rows": rows,
        "predicted messages": messages,
        "predicted step": measured["computing"] + rows + messages,
    }


def report(options: argparse.Namespace, ranks: int, rows: list[dict[str, Any]]) -> None:
    """Print the table, and write the file."""
    lines = [(*HEAD, "step", "predicted")]
    for row in rows:
        keys = ("rows", "predicted rows", "messages", "predicted messages", "step")
        times = [f"{1e3 * row[key]:.1f}" for key in (*keys, "predicted step")]
        sizes = [f"{row[key]:,.0f}" for key in ("planned bytes", "bytes")]
        lines.append((row["layers by"], *sizes, *times))
    print(f"{ranks} ranks, {options.batch} clicks each, 26 tables of width {options.width}, ms")
    print("\n".join(table(lines)), flush=True)
    if options.json:
        about = {"ranks": ranks, "batch": options.batch, "width": options.width}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
