"""Measure the time that overlapped messages hide: without overlap, with it, in order of arrival.

    bash jobs/emulated_cluster.sh up 4 --rate 1gbit
    export PYTHONPATH=tests
    bash jobs/emulated_cluster.sh run -n 2 python -m mpi4py benchmarks/overlap.py --data DIRECTORY

The steps have new factors and old bases. Groups of steps of all methods alternate; times are
medians over rounds. In order of arrival, gradients do not overtake statistics, nor early layers
late ones. The time of a stage is the waiting time of training in it, on the rank that comes last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cluster import Images

import mpikfac
from mpikfac import CommOpt, Strategy, Transport
from mpikfac_apps.problems import models
from mpikfac_apps.text import table
from support import inside

STAGES = ("reduce statistics", "reduce gradients")
WAYS = ("in turn", "beside", "on arrival")
AT_ONCE = 5  # steps
Step = Callable[[], None]


def main() -> None:
    """Print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", required=True, help="unpacked CIFAR-10")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--fusion", type=int, default=3, help="layers per message")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    comm = mpikfac.world()
    images = Images(comm, options)
    made = {way: make(comm, options, images, way) for way in WAYS}
    found: dict[str, list[list[float]]] = {way: [] for way in made}
    for _ in range(options.rounds):
        for way, (kfac, step) in made.items():
            found[way].append(timed(comm, kfac, step, partial(inside.settle, kfac)))
    if comm.rank == 0:
        lines = [("", "step ms", *(f"{stage} ms" for stage in STAGES))]
        for way, rows in found.items():
            times = [f"{1e3 * median(column):.1f}" for column in zip(*rows)]
            lines.append((way, *times))
        print(f"{options.model}, {comm.size} ranks, {options.batch} images each")
        print("\n".join(table(lines)), flush=True)
    for kfac, _ in made.values():
        kfac.close()


def make(comm: Any, options: argparse.Namespace, images: Images, way: str) -> tuple[Any, Step]:
    """Return a trainer after the first step, with constant bases, and a step of the trainer.

    Collective over: world.
    """
    torch.manual_seed(0)
    model = models.build(options.model, 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    strategy = Strategy(
        CommOpt(), transport=Transport(fusion=options.fusion, overlap=way != "in turn")
    )
    with inside.sent_on_arrival() if way == "on arrival" else nullcontext():
        kfac = mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.03, inv_update_steps=10**9)

    def step() -> None:
        x, y = images.next()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()

    step()
    return kfac, step


def timed(comm: Any, trainer: Any, step: Step, settle: Step) -> list[float]:
    """Return seconds of a step, and of each stage the least waiting time of any rank.

    The numbers are means of several steps without pauses, because messages could proceed in pauses.

    Collective over: world.

    Args:
        settle: ends the messages that are unfinished after the steps.
    """
    waited = []
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(AT_ONCE):
        trainer.trace.clear()
        step()
        waited.append({stage: trainer.trace.seconds[stage] for stage in STAGES})
    settle()  # unfinished messages count, too
    comm.Barrier()
    seconds = time.perf_counter() - start
    everyone = comm.allgather(waited)
    exposed = [
        sum(min(ranks[number][stage] for ranks in everyone) for number in range(AT_ONCE))
        for stage in STAGES
    ]
    return [total / AT_ONCE for total in (seconds, *exposed)]


if __name__ == "__main__":
    main()
