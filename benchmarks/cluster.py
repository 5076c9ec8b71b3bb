"""Measure step times of all strategies on the present network, and compare predictions.

    bash jobs/emulated_cluster.sh up 4 --rate 1gbit
    bash jobs/emulated_cluster.sh run mpikfac calibrate --out 1gbit.json \
        --model resnet20,resnet32
    bash jobs/emulated_cluster.sh run python -m mpi4py benchmarks/cluster.py --machine 1gbit.json \
        --model resnet20 --data DIRECTORY --json cluster.json

"shampoo:mem-opt" is a preconditioner under a strategy, with the preconditioner's default settings;
strategies without a preconditioner have inverses and a damping of 0.03. "mem-opt+overlap" overlaps
messages with the backward pass.

In a round, each strategy runs for one refresh interval. A strategy's step is the mean over an
interval, the median over rounds. Communication is the time in communication stages on the rank that
comes last to each stage. The communication of K-FAC is the difference between a strategy and plain
SGD in the same round. Predictions take messages and decompositions from the machine file. The
network's computing time is measured between the rounds, because the speed of a shared machine
changes. Strategies with curvature servers are left out, because fewer ranks train; `exchange.py`
measures the strategies that exchange weights, and gradients with their own momentum.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import mpikfac
from mpikfac.lab import TopK
from mpikfac.preconditioners import named_preconditioner
from mpikfac_apps.lab.predict import calibrate
from mpikfac_apps.lab.predict.options import STRATEGIES as NAMES
from mpikfac_apps.planning.facts import strategy_of
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import table
from mpikfac_apps.training import batches

Step = Callable[[], None]
OVERLAP = "+overlap"


def measured(name: str) -> bool:
    """Return whether all ranks train one model, by an optimizer with momentum."""
    strategy = mpikfac.plan.NAMED["comm-opt" if name == "sgd" else name].strategy
    sync, apart = strategy.sync, strategy.refresh.servers or strategy.sync.server_ranks
    return not (apart or sync.local_steps or isinstance(strategy.compression.gradients, TopK))


STRATEGIES = [name for name in NAMES if measured(name)]


def main() -> None:
    """Print the table and write the figures.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", required=True, help="unpacked CIFAR-10")
    parser.add_argument("--machine", required=True, help="a file of mpikfac calibrate")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--inv_update_steps", type=int, default=10, help="steps of an interval")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    comm = mpikfac.world()
    images = Images(comm, options)
    made = {name: make(comm, name, options, images) for name in options.strategies}
    network = calibrate.TimedNetwork(options.model, options.batch, None, None, torch.device("cpu"))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, (trainer, step) in made.items():
            found[name].append(interval(comm, trainer, step, options.inv_update_steps))
        calibrate.visit(comm, [network])
    machine = mpikfac.predict.load_machine(options.machine)
    machine = dataclasses.replace(machine, networks=(network.seconds(comm),))
    rows = [
        row(name, found, mpikfac.predict.simulate(trainer.plan, machine, job_of(name, options)))
        for name, (trainer, _) in made.items()
    ]
    if comm.rank == 0:
        report(options, comm.size, rows)


class Images:
    """The rank's shards of CIFAR-10, one after another."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        found = datasets.load("cifar10", options.data, 4096)
        device = torch.device("cpu")
        self.normalise = batches.Normalise(found.train_images, device)
        self.images, self.labels = found.train_images, found.train_labels
        self.rank, self.ranks, self.batch, self.step = comm.rank, comm.size, options.batch, 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next shard."""
        start = (self.step * self.ranks + self.rank) * self.batch % len(self.images)
        self.step += 1
        some = slice(start, start + self.batch)
        return self.normalise(self.images[some]), self.labels[some]


def make(comm: Any, name: str, options: argparse.Namespace, images: Images) -> tuple[Any, Step]:
    """Return a trainer of the strategy after an interval, and a step of the trainer.

    Collective over: world.
    """
    torch.manual_seed(0)
    model = models.build(options.model, 10).to(memory_format=torch.channels_last)
    job = job_of(name, options)
    overlap = name.endswith(OVERLAP)
    asked, _, name = name.removesuffix(OVERLAP).rpartition(":")
    momentum = 0.0 if asked else 0.9  # else the preconditioner uses its default momentum
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum, weight_decay=5e-4)
    machine = mpikfac.predict.load_machine(options.machine)
    trainer: Any
    if name == "sgd":
        strategy = overlapped(mpikfac.Strategy(mpikfac.MemOpt()), overlap)
        trainer = mpikfac.FirstOrderTrainer(model, optimizer, comm, strategy)
    else:
        strategy, preconditioner = strategy_of(
            name, comm.size, named_preconditioner(asked or "inverse")
        )
        strategy = overlapped(strategy, overlap)
        layers, others = models.shapes_of(options.model)
        forms = mpikfac.preconditioners.forms(preconditioner)
        strategy = mpikfac.predict.tuned(strategy, layers, others, comm.size, machine, job, forms)
        settings: Any = {
            "factor_update_steps": 1,
            "inv_update_steps": options.inv_update_steps,
            "preconditioner": preconditioner,
        }
        settings |= {} if asked else {"damping": 0.03}
        trainer = mpikfac.KFAC(model, optimizer, comm, strategy, **settings)

    def step() -> None:
        x, y = images.next()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        trainer.step()

    for _ in range(options.inv_update_steps):
        step()
    return trainer, step


def overlapped(strategy: mpikfac.Strategy, overlap: bool) -> mpikfac.Strategy:
    """Return the strategy, with overlapped messages if requested."""
    transport = strategy.transport
    transport = dataclasses.replace(transport, overlap=overlap or transport.overlap)
    return dataclasses.replace(strategy, transport=transport)


def job_of(name: str, options: argparse.Namespace) -> mpikfac.predict.Job:
    """Return the training that a strategy's prediction is for."""
    preconditioner = mpikfac.preconditioners.PRECONDITIONERS[name.rpartition(":")[0] or "inverse"]
    model, batch, interval = options.model, options.batch, options.inv_update_steps
    return mpikfac.predict.Job(model, batch, 1, interval, grafting=preconditioner.defaults.grafting)


def interval(comm: Any, trainer: Any, step: Step, steps: int) -> tuple[float, float]:
    """Return seconds per step, and seconds of communication per step, over `steps` steps.

    Collective over: world.
    """
    mine = []
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(steps):  # without pauses, in which overlapped messages could proceed
        trainer.trace.clear()
        step()
        mine.append({stage: trainer.trace.seconds[stage] for stage in mpikfac.trace.COMMUNICATION})
    comm.Barrier()
    seconds = time.perf_counter() - start
    everyone = comm.allgather(mine)
    talking = sum(
        min(found[number][stage] for found in everyone)
        for number in range(steps)
        for stage in mpikfac.trace.COMMUNICATION
    )
    return seconds / steps, talking / steps


def row(
    name: str, found: dict[str, list[tuple[float, float]]], predicted: mpikfac.predict.Prediction
) -> dict[str, Any]:
    """Return the measured and predicted numbers of a strategy."""
    own, sgd = found[name], found.get("sgd", found[name])
    return {
        "strategy": name,
        "step": median(seconds for seconds, _ in own),
        "communication": median(talking for _, talking in own),
        "of K-FAC": median(a - b for (_, a), (_, b) in zip(own, sgd)),
        "predicted": predicted.mean.seconds,
        "predicted communication": predicted.mean.exposed,
        "sent": predicted.mean.sent,
    }


def report(options: argparse.Namespace, ranks: int, rows: list[dict[str, Any]]) -> None:
    """Print the table, fastest first, and write the file."""
    rows = sorted(rows, key=lambda row: row["step"])
    head = ("strategy", "step ms", "predicted", "off by", "comm. ms", "of K-FAC", "sent MB")
    lines = [head]
    for row in rows:
        off = row["predicted"] / row["step"] - 1
        times = [row["step"], row["predicted"], row["communication"], row["of K-FAC"]]
        step, predicted, talking, kfac = (f"{1e3 * seconds:.0f}" for seconds in times)
        sent = f"{row['sent'] / 1e6:.2f}"
        lines.append((row["strategy"], step, predicted, f"{off:+.0%}", talking, kfac, sent))
    print(f"{options.model}, {ranks} ranks, {options.batch} images each, {options.machine}")
    print("\n".join(table(lines)))
    offs = [abs(row["predicted"] / row["step"] - 1) for row in rows]
    pairs = list(itertools.combinations(rows, 2))  # faster strategy first
    right = sum(a["predicted"] <= b["predicted"] for a, b in pairs)
    within = sum(off <= 0.15 for off in offs)
    print(f"within 15 %: {within} of {len(rows)}; the farthest is off by {max(offs):.0%}")
    print(f"pairs of strategies in the predicted order: {right} of {len(pairs)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
