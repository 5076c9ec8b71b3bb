"""Measure what a step by default costs once its intervals have grown, on ten networks.

    OMP_NUM_THREADS=1 python benchmarks/default_cost.py [--rounds 5] [--networks NAME ...]

SGD, Muon and K-FAC run alternating blocks of 50 steps, on the networks and batches of `defaults.py`
with random inputs. A block contains everything that K-FAC does in 50 steps at its default
intervals: 50 new directions, 5 updates of the factors and 1 update of the decompositions. Results
are CPU seconds of a block relative to SGD's: medians over rounds, and in brackets minimum and
maximum. The first block does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from defaults import NETWORKS
from torch import nn
from training import by_turns

import mpikfac
from mpikfac.plan import BASIS_EVERY
from mpikfac.settings import SETTLED
from mpikfac_apps.options.options import Options
from mpikfac_apps.problems import models
from mpikfac_apps.text import table
from mpikfac_apps.training.parts.optimizers import make_optimizer

IMAGE = 3, 32, 32
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: make_optimizer(Options(optimizer="sgd"), model),
    "muon": lambda model: make_optimizer(Options(optimizer="muon"), model),
    "kfac": mpikfac.KFACOptimizer,
}


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.networks:
        steps = {kind: steps_of(name, make) for kind, make in OPTIMIZERS.items()}
        for _ in range(SETTLED):
            steps["kfac"]()
        turns = by_turns(
            lambda kind, steps=steps: block(steps[kind]), tuple(steps), options.rounds + 1
        )
        ratios = {
            kind: sorted(mine / sgd for mine, sgd in zip(turns[kind][1:], turns["sgd"][1:]))
            for kind in ("muon", "kfac")
        }
        cells = [f"{statistics.median(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})" for r in ratios.values()]
        seconds = f"{statistics.median(turns['sgd'][1:]) / BASIS_EVERY:.4f} s"
        print("\n".join(table([(name, seconds, *cells)])), flush=True)


def steps_of(name: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], None]:
    """Return a training step of a network of `defaults.py`."""
    torch.manual_seed(0)
    task = NETWORKS[name]
    network, batch = task.get("model", name), int(task["batch"])
    entry = models.network(network)
    model = models.channels_last(models.build(network))
    optimizer = make(model)
    if entry.task.inputs == "tokens":
        inputs = torch.randint(256, (batch, *entry.image))
        labels = torch.randint(256, (batch, *entry.image))
    else:
        inputs = torch.rand(batch, *(entry.image or IMAGE))
        labels = torch.randint(10, (batch,))
    targets = entry.task.targets(inputs, labels)

    def step() -> None:
        optimizer.zero_grad()
        entry.task.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def block(step: Callable[[], None]) -> float:
    """Return the CPU seconds of a block of steps."""
    start = time.process_time()
    for _ in range(BASIS_EVERY):
        step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
