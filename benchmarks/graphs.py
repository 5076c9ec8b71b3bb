"""Measure the sums over neighbours of graph networks at 1, 2, 4 ... ranks, with predictions beside.

    bash jobs/emulated_cluster.sh up 4 --rate 100mbit
    bash jobs/emulated_cluster.sh run mpikfac calibrate --out 100mbit.json \
        --model digits_cnn
    bash jobs/emulated_cluster.sh run python -m mpi4py benchmarks/graphs.py \
        --machine 100mbit.json --json graphs.json

The first ranks of the job train, with each number of ranks in turn, while the others sleep. An
epoch is a step on all nodes. Bytes are those of rows for other ranks, on the rank that sends the
most: planned from the partition, and counted by the trace. Seconds of an epoch are the median.
Communication is the time in communication stages on the rank that comes last to each stage; the
predicted communication takes messages from the machine file. The predicted epoch is the predicted
communication plus the measured computing time, because the speed of a shared machine changes.
Without a machine file, nothing is predicted. The accuracy is that of the nodes whose classes are
not known in training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

import mpikfac
from mpikfac.predict.costs import message_seconds
from mpikfac_apps.graphs.aggregates import AGGREGATES, THERE
from mpikfac_apps.graphs.data import Planted
from mpikfac_apps.graphs.train import GraphOptions, GraphWork
from mpikfac_apps.text import ms, table

NAP = 0.02  # seconds between checks of a rank that waits
FREE = mpikfac.predict.Network("graph", 1, *[0.0] * 5)  # computes in no time


def main() -> None:
    """Print the table and write the figures.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="a file of mpikfac calibrate")
    parser.add_argument("--nodes", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--delay", type=int, default=4)
    parser.add_argument("--partition", default="greedy")
    parser.add_argument("--optimizer", default="kfac")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.set_num_threads(1)
    rows = []
    for ranks in [2**k for k in range(comm.size.bit_length()) if 2**k <= comm.size]:
        team = comm.Split(comm.rank >= ranks, 0)
        if comm.rank < ranks:
            names = AGGREGATES if ranks > 1 else AGGREGATES[:1]
            rows += [row(team, name, options) for name in names]
        rest(comm)
        team.Free()
    if comm.rank == 0:
        report(options, rows)


def rest(comm: Any) -> None:
    """Wait for all ranks, without using the core.

    Collective over: world.
    """
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(NAP)


def row(comm: Any, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with an aggregate; return the measured and predicted numbers.

    Collective over: comm.
    """
    chosen = GraphOptions(
        planted=Planted(nodes=options.nodes),
        epochs=options.epochs,
        delay=options.delay,
        partition=options.partition,
        optimizer=options.optimizer,
        aggregate=name,
    )
    torch.manual_seed(0)
    work = GraphWork(comm, chosen, torch.device("cpu"))
    epochs = [epoch(comm, work, chosen, step) for step in range(options.epochs)]
    seconds, talking, counted = zip(*epochs)
    planned = sum(often * message.bytes for message, often in messages(comm, work, chosen))
    found: dict[str, Any] = {
        "ranks": comm.size,
        "aggregate": name,
        "planned MB": max(comm.allgather(planned)) / 1e6,
        "counted MB": max(comm.allgather(fmean(counted))) / 1e6,
        "communication s": median(talking),
        "predicted communication s": None,
        "epoch s": median(seconds),
        "predicted epoch s": None,
        "accuracy": work.test()["accuracy"],
    }
    if options.machine:
        machine = mpikfac.predict.load_machine(options.machine)
        found["predicted communication s"] = expected = predicted(comm, work, chosen, machine)
        computing = median(of_epoch - said for of_epoch, said in zip(seconds, talking))
        found["predicted epoch s"] = computing + expected
    return found


def epoch(comm: Any, work: GraphWork, options: GraphOptions, step: int) -> tuple[float, float, int]:
    """Take a step; return its seconds, those of communication, and the rank's bytes of rows.

    Collective over: comm.
    """
    for group in work.trainer.optimizer.param_groups:
        group["lr"] = options.rate_of(step, options.epochs)
    work.trace.clear()
    comm.Barrier()
    start = time.perf_counter()
    work.step(step)
    comm.Barrier()
    seconds = time.perf_counter() - start
    everyone = comm.allgather(dict(work.trace.seconds))
    stages = mpikfac.trace.COMMUNICATION
    talking = sum(min(found.get(stage, 0.0) for found in everyone) for stage in stages)
    return seconds, talking, sum(work.trace.sent[stage] for stage in THERE)


def messages(
    comm: Any, work: GraphWork, options: GraphOptions
) -> list[tuple[mpikfac.plan.Message, float]]:
    """Return the rank's messages of rows, and how often an epoch has each message.

    Collective over: comm.
    """
    part, turns = work.sums.halo.part, options.delay if work.sums.late else 1
    size, layers = options.hidden * part.own.values().itemsize, options.layers - 1
    there = comm.allgather(part.counts_out)
    of_stages = zip(THERE, (there, [list(column) for column in zip(*there)]))
    return [
        (message, layers / turns)
        for stage, counts in of_stages
        for turn in range(turns)
        for of_turn in [[[len(range(turn, n, turns)) for n in line] for line in counts]]
        for message in mpikfac.plan.rows(stage, of_turn, size, comm.rank)
    ]


def predicted(
    comm: Any, work: GraphWork, options: GraphOptions, machine: mpikfac.predict.Machine
) -> float:
    """Return the predicted seconds of communication in an epoch.

    Collective over: comm.
    """
    plan, kfac = work.trainer.plan, options.kfac
    of_rows = [
        often * message_seconds(message, plan, comm.rank, machine)
        for message, often in messages(comm, work, options)
    ]
    machine = dataclasses.replace(machine, networks=(FREE,))
    job = mpikfac.predict.Job(
        FREE.model, FREE.batch, kfac.factor_update_steps, kfac.inv_update_steps
    )
    of_trainer = mpikfac.predict.simulate(plan, machine, job).mean.exposed
    return max(comm.allgather(sum(of_rows))) + of_trainer


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table, and write the file."""
    head = ("ranks", "aggregate", "MB", "counted", "comm. ms", "predicted", "epoch ms", "predicted")
    lines = [(*head, "accuracy")]
    for found in rows:
        sizes = (f"{found[f'{kind} MB']:.3f}" for kind in ("planned", "counted"))
        times = (
            ms(found[f"{kind}{part} s"])
            for part in ("communication", "epoch")
            for kind in ("", "predicted ")
        )
        about = str(found["ranks"]), found["aggregate"]
        lines.append((*about, *sizes, *times, f"{found['accuracy']:.4f}"))
    print(f"{options.nodes} nodes, {options.partition} partition, {options.optimizer}")
    print("\n".join(table(lines, left=2)), flush=True)
    if options.json:
        chosen = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": chosen, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
