"""Compare data parallel and split layers: bytes by plan and counted, and times of a step.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/hybrid.py --widths 2048 2048 2048
    ... benchmarks/hybrid.py --latency 5e-5 --bandwidth 1.2e8      # with predicted seconds

A network of linear layers with ReLU in between is trained by SGD. All distributions alternate in
each repetition. Seconds are medians over repetitions, of the slowest rank; they include waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from itertools import pairwise

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer, TensorParallelPlan, Trace
from mpikfac.plan import (
    activation_messages,
    layer_messages,
    places,
    tensor_parallel_table,
    wire_bytes,
)
from mpikfac.predict import Level, Machine, choose_tensor_parallel_plan, tensor_parallel_seconds


class Run:
    """A network with a tp_plan, and its trainer."""

    def __init__(self, options, comm, tp_plan):
        torch.manual_seed(0)
        self.model = network(options.widths)
        self.calls = mpikfac.lab.layer_calls(
            self.model, torch.empty(options.batch, options.widths[0])
        )
        self.trace, self.tp_plan = Trace(), tp_plan
        mpikfac.lab.split_layers(self.model, comm, tp_plan, self.trace)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.trainer = FirstOrderTrainer(self.model, optimizer, comm, trace=self.trace)
        self.seconds, self.parts = [], []

    def step(self, comm, images, labels):
        """Take a step, and keep the seconds of the slowest rank and of stages."""
        self.trace.clear()
        comm.Barrier()
        start = time.perf_counter()
        self.trainer.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.trainer.step()
        self.seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
        self.parts.append(self.trace.communication_seconds())

    def bytes_of_messages(self, comm):
        """Return the bytes handed to MPI in a step: by plan, and counted at the calls."""
        planned: Counter[str] = Counter()
        at = places(self.calls, self.tp_plan.layers)
        for call in self.calls:
            for one in activation_messages(call, at[call.name], self.tp_plan.tp_size, 4):
                planned[one.stage] += one.bytes
        for one in self.trainer.plan.messages(comm.rank, False, False):
            planned[one.stage] += one.bytes
        return sum(planned.values()), sum(self.trace.sent.values())

    def messages(self, ranks):
        """Return the messages of all layers, as the choice counts the messages."""
        at = places(self.calls, self.tp_plan.layers)
        tp_size = self.tp_plan.tp_size
        return [m for c in self.calls for m in layer_messages(c, at[c.name], tp_size, ranks, 4)]


def network(widths):
    """Return linear layers with ReLU in between."""
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    """Print the plan, and a line for each tp_plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[2048, 2048, 2048])
    add("--batch", type=int, default=32, help="examples per rank")
    add("--repetitions", type=int, default=9)
    add("--latency", type=float, help="seconds of the smallest message")
    add("--bandwidth", type=float, help="bytes per second of a rank")
    options = parser.parse_args()
    comm = mpikfac.world()
    machine = None
    if options.latency:
        machine = Machine("given", Level(options.latency, options.bandwidth), (), {})
    runs = {name: Run(options, comm, d) for name, d in distributions(options, comm, machine)}
    generator = torch.Generator().manual_seed(comm.rank)
    images = torch.randn(options.batch, options.widths[0], generator=generator)
    labels = torch.randint(options.widths[-1], (options.batch,), generator=generator)
    for _ in range(options.repetitions + 1):
        for run in runs.values():
            run.step(comm, images, labels)
    if comm.rank == 0:
        print(tensor_parallel_table(runs["auto"].calls, runs["auto"].tp_plan, comm.size))
        report(runs, comm, machine)


def distributions(options, comm, machine):
    """Yield names and distributions: none split, all split alike, in pairs, and the choice."""
    model, ranks = network(options.widths), comm.size
    calls = mpikfac.lab.layer_calls(model, torch.empty(options.batch, options.widths[0]))
    names = [call.name for call in calls]
    yield "data parallel", TensorParallelPlan()
    yield "outputs", TensorParallelPlan(ranks, dict.fromkeys(names, "outputs"))
    yield "inputs", TensorParallelPlan(ranks, dict.fromkeys(names, "inputs"))
    pairs = {name: ("outputs", "inputs")[place % 2] for place, name in enumerate(names)}
    yield "pairs", TensorParallelPlan(ranks, pairs)
    yield "auto", choose_tensor_parallel_plan(calls, ranks, machine)


def report(runs, comm, machine) -> None:
    """Print bytes and seconds of all runs."""
    print(
        f"{'':14} {'wire MB':>8} {'to MPI MB':>10} {'counted':>8} {'step ms':>8} {'ratio':>6} "
        f"{'messages ms':>12} {'predicted':>10}"
    )
    whole = statistics.median(runs["data parallel"].seconds[1:])
    for name, run in runs.items():
        planned, counted = run.bytes_of_messages(comm)
        messages, seconds = run.messages(comm.size), statistics.median(run.seconds[1:])
        predicted = "-"
        if machine is not None:
            seconds_of = tensor_parallel_seconds(run.calls, run.tp_plan, comm.size, machine)
            predicted = f"{seconds_of * 1e3:.1f}"
        print(
            f"{name:14} {wire_bytes(messages) / 1e6:8.2f} {planned / 1e6:10.2f} "
            f"{counted / 1e6:8.2f} {seconds * 1e3:8.1f} {seconds / whole:6.2f} "
            f"{statistics.median(run.parts[1:]) * 1e3:12.1f} {predicted:>10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
