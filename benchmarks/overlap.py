"""What sending beside the backward pass hides: the same messages in turn and beside, on a network.

    bash jobs/emulated_cluster.sh up 4 --rate 1gbit
    bash jobs/emulated_cluster.sh run -n 2 python -m mpi4py benchmarks/overlap.py --data DIRECTORY

Steps with new factors and without new bases, of which the model's last layers' messages may go
first. Exposed is what the training waits in a stage, on the rank that comes last to it; sending is
what the thread spends, too. A step of each takes turns; medians over all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cluster import Images

import mpikfac
from mpikfac_apps import models
from mpikfac_apps.command import table

STAGES = ("reduce statistics", "reduce gradients")
KINDS = ("exposed", "sending")
Step = Callable[[], None]


def main() -> None:
    """Prints the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--data", required=True, help="unpacked CIFAR-10")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--fusion", type=int, default=3, help="layers per message")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    comm = mpikfac.world()
    images = Images(comm, options)
    made = {beside: make(comm, options, images, beside) for beside in (False, True)}
    found: dict[bool, list[list[float]]] = {beside: [] for beside in made}
    for _ in range(options.steps):
        for beside, (kfac, step) in made.items():
            found[beside].append(timed(comm, kfac, step))
    if comm.rank == 0:
        head = ("", "step ms", *(f"{stage}, {kind}" for stage in STAGES for kind in KINDS))
        lines = [head]
        for beside, rows in found.items():
            times = [f"{1e3 * median(column):.1f}" for column in zip(*rows)]
            lines.append(("beside" if beside else "in turn", *times))
        print(f"{options.model}, {comm.size} ranks, {options.batch} images each")
        print("\n".join(table(lines)), flush=True)
    for kfac, _ in made.values():
        kfac.close()


def make(comm: Any, options: argparse.Namespace, images: Images, beside: bool) -> tuple[Any, Step]:
    """A trainer after its first step, with bases that stay, and a step of it.

    Collective over: world.
    """
    torch.manual_seed(0)
    model = models.build(options.model, 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    strategy = mpikfac.Strategy.comm_opt(comm.size, fusion=options.fusion, overlap=beside)
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, damping=0.03, basis_every=10**9)

    def step() -> None:
        x, y = images.next()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()

    step()
    return kfac, step


def timed(comm: Any, kfac: Any, step: Step) -> list[float]:
    """Seconds of a step, and of each stage on the rank that comes last: exposed, and of sending.

    Collective over: world.
    """
    kfac.trace.clear()
    comm.Barrier()
    start = time.perf_counter()
    step()
    comm.Barrier()
    seconds = [time.perf_counter() - start]
    for stage in STAGES:
        exposed, beside = kfac.trace.seconds[stage], kfac.trace.beside[stage]
        seconds += [min(comm.allgather(exposed)), min(comm.allgather(beside or exposed))]
    return seconds


if __name__ == "__main__":
    main()
