"""Compare asynchronous with synchronous SGD: updates, images and seconds to a test loss.

    OMP_NUM_THREADS=1 mpirun --oversubscribe -n 5 python -m mpi4py benchmarks/asynchronous.py

A small network learns handwritten digits, 16 images per step on each rank that trains. An update of
c synchronous ranks uses 16 c images, with c times the learning rate; an update of a client uses 16
images. The weights are tested after every 640 images of all ranks together. With a straggler, the
last rank that trains is slower by 50 ms in each step. Each cell is a median over seeds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import MemOpt, Strategy
from mpikfac.lab import ParameterServer
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import table

BATCH, RATE, MOMENTUM = 16, 0.01, 0.9
TARGET = 0.15  # mean cross entropy of the test images; the best runs end at 0.05
EPOCH = 40 * BATCH  # images


class Problem(NamedTuple):
    """Images as float32 `[n, 1, 8, 8]` of mean 0 and variance 1, and labels."""

    images: torch.Tensor
    labels: torch.Tensor
    tests: torch.Tensor
    answers: torch.Tensor


class Found(NamedTuple):
    """The cost of a run until the target, and its final result."""

    updates: float
    images: float
    seconds: float
    loss: float
    staleness: float
    most: float


def main() -> None:
    """Run all cells, and print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=14)
    options = parser.parse_args()
    comm, data = mpikfac.world(), problem()
    rows = [("", "updates", "images", "seconds", "last loss", "staleness", "largest")]
    for delay in (0.0, 0.05):
        for clients in (1, 2, 4):
            for way in ("synchronous", "asynchronous"):
                if clients < 2 and delay:
                    continue
                given = (comm, way, clients, delay, data, options.epochs)
                found = [run(*given, seed) for seed in range(options.seeds)]
                if comm.rank == 0:
                    cells = [f"{median(column):.3g}" for column in zip(*found)]
                    late = ", a straggler" if delay else ""
                    rows.append((f"{way}, {clients}{late}", *cells))
                    print(rows[-1], flush=True)
    if comm.rank == 0:
        print("\n".join(table(rows)))


def problem() -> Problem:
    """Return the digits."""
    found = datasets.load("digits")
    images = [part.float() for part in (found.train_images, found.test_images)]
    mean, deviation = images[0].mean(), images[0].std()
    train, test = ((part - mean) / deviation for part in images)
    return Problem(train, found.train_labels, test, found.test_labels)


def run(
    comm: Any, way: str, clients: int, delay: float, data: Problem, epochs: int, seed: int
) -> Found | None:
    """Train on the first ranks, while the others sleep; return the cost, on rank 0.

    Collective over: comm.
    """
    ranks = clients + (way == "asynchronous")
    team, found = comm.Split(comm.rank < ranks, comm.rank), None
    if comm.rank < ranks:
        torch.manual_seed(seed)
        model = models.build("digits_cnn", 10, 1)
        rate = RATE * (clients if way == "synchronous" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        train = synchronous if way == "synchronous" else asynchronous
        found = train(team, model, optimizer, data, epochs, delay, seed)
    done = comm.Ibarrier()
    while not done.Test():  # ranks in a barrier would take cores from ranks that train
        time.sleep(0.01)
    return found


def synchronous(
    comm: Any, model: nn.Module, optimizer: Any, data: Problem, epochs: int, delay: float, seed: int
) -> Found:
    """Train by averaged gradients."""
    trainer = mpikfac.FirstOrderTrainer(model, optimizer, comm)
    step = stepper(trainer, data, seed, comm.rank, delay if comm.rank == comm.size - 1 else 0.0)

    def advance(goal: int) -> int:
        while trainer.steps * comm.size * BATCH < goal:
            step()
        return trainer.steps

    return measured(model, data, epochs, advance, lambda: Counter(), BATCH * comm.size)


def asynchronous(
    comm: Any, model: nn.Module, optimizer: Any, data: Problem, epochs: int, delay: float, seed: int
) -> Found | None:
    """Train with a server: clients take steps until all of them together have taken enough."""
    strategy = Strategy(MemOpt(), sync=ParameterServer())
    team = mpikfac.split_comm(comm, 1)
    if team.comm is None:
        mpikfac.lab.run_parameter_server(model, optimizer, team)
        return None
    ranks = team.comm
    trainer = mpikfac.lab.AsyncSGD(model, optimizer, team, strategy)
    step = stepper(trainer, data, seed, ranks.rank, delay if ranks.rank == ranks.size - 1 else 0.0)

    def advance(goal: int) -> int:
        while trainer.version * BATCH < goal:
            step()
        trainer.average_replicas()
        return trainer.version

    def staleness() -> Counter[int]:
        return sum(ranks.allgather(trainer.staleness), Counter[int]())

    found = measured(model, data, epochs, advance, staleness, BATCH)
    trainer.close()
    return found


def stepper(trainer: Any, data: Problem, seed: int, rank: int, delay: float) -> Callable[[], None]:
    """Return a function that takes a step on images of the rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def step() -> None:
        chosen = torch.randint(len(data.images), (BATCH,), generator=generator)
        time.sleep(delay)
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(data.images[chosen]), data.labels[chosen]).backward()
        trainer.step()

    return step


def measured(
    model: nn.Module,
    data: Problem,
    epochs: int,
    advance: Callable[[int], int],
    staleness: Callable[[], Counter[int]],
    size: int,
) -> Found:
    """Train for all epochs; return the cost until the first test below the target."""
    seconds, loss, reached = 0.0, torch.nan, (torch.nan, torch.nan)
    for epoch in range(1, epochs + 1):
        began = time.perf_counter()
        updates = advance(epoch * EPOCH)
        seconds += time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(data.tests), data.answers).item()
        model.train()
        if loss < TARGET and reached[0] != reached[0]:
            reached = updates, seconds
    counts = staleness()
    mean = sum(k * n for k, n in counts.items()) / max(1, counts.total())
    updates, until = reached
    return Found(updates, updates * size, until, loss, mean, max(counts, default=0))


if __name__ == "__main__":
    main()
