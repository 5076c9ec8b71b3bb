"""Measure what layer-wise norms cost, and what distributing them over ranks would cost.

    mpirun -n 2 python -m mpi4py benchmarks/norms.py

LARS and LAMB need two norms of every tensor per step: of the weights and of the update. Every rank
computes all norms, or the norms of its part of the layers, followed by one small Allreduce of all
norms. Both alternate; times are medians over rounds, of the slowest rank.

A second table has the same results for published machines. The norms read weights and updates once:
2 of the 5 passes over the weights of the machine's optimizer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

import mpikfac
from mpikfac import MemOpt, Strategy
from mpikfac.comm import Comm, Grid
from mpikfac.plan import message
from mpikfac.predict.costs import message_seconds
from mpikfac_apps.problems import models
from mpikfac_apps.text import table

MODELS = ("resnet20", "resnet50")


def main() -> None:
    """Print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=51)
    rounds = parser.parse_args().rounds
    comm = mpikfac.world()
    grid = Grid(comm, 1, mpikfac.Trace())
    lines = [("model", "tensors", "weights", "step of SGD", "all norms", "a share", "Allreduce")]
    for name in MODELS:
        lines.append(row(comm, grid, name, rounds))
    if comm.rank == 0:
        print(f"{comm.size} ranks, median ms of {rounds} rounds, slowest rank, not overlapped")
        print("\n".join(table(lines)))
        print("published machines, resnet50, ms")
        print("\n".join(table(predicted())), flush=True)


def predicted() -> list[tuple[str, ...]]:
    """Return the rows of published machines: all norms, a share, and an Allreduce of all norms."""
    layers, others = models.shapes_of("resnet50")
    rows = [("machine", "ranks", "step", "all norms", "a share", "Allreduce", "saved")]
    for name in mpikfac.predict.published_machines():
        machine = mpikfac.predict.load_machine(name)
        network = machine.network("resnet50", 32)
        whole = network.optimizer * 2 / 5
        step = network.forward + network.backward + network.gradients + network.optimizer
        for ranks in (8, 64):
            plan = mpikfac.make_plan(layers, ranks, Strategy(MemOpt()), others)
            sent = message("norms", "Allreduce", "world", [(0, 322)], ranks, 4)
            added = message_seconds(sent, plan, 0, machine)
            times = step, whole, whole / ranks, added, whole - whole / ranks - added
            rows.append((name, f"{ranks}", *(f"{1e3 * seconds:.3f}" for seconds in times)))
    return rows


def row(comm: Comm, grid: Grid, name: str, rounds: int) -> tuple[str, ...]:
    """Return the cells of a network.

    Collective over: world.
    """
    model = models.build(name, 10)
    weights = [parameter.detach() for parameter in model.parameters()]
    updates = [torch.randn_like(weight) for weight in weights]
    for parameter, update in zip(model.parameters(), updates):
        parameter.grad = update
    sgd = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    mine = share(weights, comm.size)[comm.rank]
    found = torch.zeros(2 * len(weights))
    norms = message("norms", "Allreduce", "world", [(0, len(found))], comm.size, 4)
    ways: list[Callable[[], object]] = [
        sgd.step,
        lambda: take([*weights, *updates]),
        lambda: take([tensors[index] for tensors in (weights, updates) for index in mine]),
        lambda: grid.exchange([norms], found.zero_()),
    ]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(1 + rounds):
        for way, of_way in zip(ways, times):
            of_way.append(seconds(comm, way))
    count = sum(weight.numel() for weight in weights)
    cells = [f"{1e3 * median(of_way[1:]):.3f}" for of_way in times]
    return name, f"{len(weights)}", f"{count:,}", *cells


def take(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of all tensors."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def share(weights: Sequence[Tensor], ranks: int) -> list[list[int]]:
    """Return by rank the numbers of the rank's tensors, balanced by elements."""
    loads, found = [0] * ranks, [[] for _ in range(ranks)]
    for index in sorted(range(len(weights)), key=lambda i: -weights[i].numel()):
        rank = loads.index(min(loads))
        loads[rank] += weights[index].numel()
        found[rank].append(index)
    return found


def seconds(comm: Comm, way: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank; all ranks begin together.

    Collective over: world.
    """
    comm.Barrier()
    began = time.perf_counter()
    way()
    return max(comm.allgather(time.perf_counter() - began))


if __name__ == "__main__":
    main()
