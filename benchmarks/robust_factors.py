"""Train K-FAC on the digits with five ranks, one of which has a broken sensor.

    OMP_NUM_THREADS=1 mpirun --oversubscribe -n 5 python -m mpi4py benchmarks/robust_factors.py

The inputs of the last rank are noise, a thousand times as large. Prints the median test accuracy of
three seeds for each combination of rules for gradients and factors.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import Strategy, Synchronous
from mpikfac.lab import Median, NearestMajority
from mpikfac.plan import Mean
from mpikfac_apps.problems import datasets

BATCH, EPOCHS, RATE = 16, 10, 0.03  # a batch is of one rank
SEEDS = range(3)
NOISE = 1000.0


def main() -> None:
    """Print the table.

    Collective over: world.
    """
    comm = mpikfac.world()
    if comm.rank == 0:
        print("| gradients | factors | right ranks | one broken rank |\n|---|---|---|---|")
    rules = ((Mean(), Mean()), (Median(), Mean()), (Median(), NearestMajority()))
    for combine, factors in rules:
        sync = Synchronous(aggregation=combine, factor_aggregation=factors)
        strategy = Strategy(sync=sync)
        shown = [
            f"{statistics.median(accuracy(comm, strategy, broken, seed) for seed in SEEDS):.1%}"
            for broken in (False, True)
        ]
        if comm.rank == 0:
            print(f"| {combine.name} | {factors.name} | {shown[0]} | {shown[1]} |", flush=True)


def accuracy(comm, strategy: mpikfac.Strategy, broken: bool, seed: int) -> float:
    """Return the test accuracy after a training.

    Collective over: comm.
    """
    torch.manual_seed(seed)
    found = datasets.digits()
    images = found.train_images.flatten(1).float() / found.white
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.03, inv_update_steps=5)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH * comm.size)[:-1]:
            share = batch.chunk(comm.size)[comm.rank]
            inputs = images[share]
            if broken and comm.rank == comm.size - 1:
                inputs = NOISE * torch.randn_like(inputs)
            else:
                torch.randn_like(inputs)  # all ranks draw the same order of images
            optimizer.zero_grad()
            outputs = model(inputs)
            kfac.record(outputs)
            F.cross_entropy(outputs, found.train_labels[share]).backward()
            kfac.step()
    kfac.close()
    with torch.no_grad():
        scores = model(found.test_images.flatten(1).float() / found.white)
    return float((scores.argmax(1) == found.test_labels).float().mean())


if __name__ == "__main__":
    main()
