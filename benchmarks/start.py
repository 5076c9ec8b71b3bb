"""Measure the start of a trainer on many ranks: seconds, communicators, and memory.

    PYTHONPATH=tests mpirun --oversubscribe -n 32 python -m mpi4py benchmarks/start.py

The start is the construction of the trainer. The memory of a rank is that of the plan, that of the
trainer's arenas after a step with new factors and bases, and the process's resident set, which also
includes torch, MPI, the model, and what an earlier strategy has left.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import mpikfac
from mpikfac_apps.problems import models
from mpikfac_apps.text import number, show, table
from support import inside

MIB = 2**20
STRATEGIES = "comm-opt,mem-opt,deferred-sharded"


def main() -> None:
    """Print a table of all strategies, with the results of the slowest or fullest rank.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--strategy", default=STRATEGIES, help="names with commas")
    parser.add_argument("--ranks_per_node", type=int, help="two levels of messages")
    options = parser.parse_args()
    comm = mpikfac.world()
    rows = [("strategy", "start, s", "communicators", "plan, MiB", "arenas, MiB", "process, MiB")]
    for name in options.strategy.split(","):
        strategy, settings = mpikfac.get_strategy(name)
        if options.ranks_per_node:
            nodes = replace(strategy.transport, ranks_per_node=options.ranks_per_node)
            strategy = replace(strategy, transport=nodes)
        row = measured(options.model, strategy, settings)
        most = [max(numbers) for numbers in zip(*comm.allgather(row))]
        seconds, communicators, *sizes = most
        cells = f"{seconds:.2f}", f"{communicators}", *(f"{size / MIB:.2f}" for size in sizes)
        rows.append((name, *cells))
    if comm.rank == 0:
        show([[f"{options.model} on {number(comm.size, 'rank')}", *table(rows)]])


def measured(
    name: str, strategy: mpikfac.Strategy, settings: dict[str, object]
) -> tuple[float, int, int, int, int]:
    """Return seconds of the start, communicators, and bytes: of plan, arenas and process.

    Collective over: world.
    """
    comm = mpikfac.world()
    torch.manual_seed(0)
    model = models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(2, 3, 32, 32)
    comm.Barrier()
    began = time.perf_counter()
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, **settings)
    comm.Barrier()
    seconds = time.perf_counter() - began
    nn.functional.cross_entropy(model(images), torch.zeros(2, dtype=torch.int64)).backward()
    kfac.step()
    planned, arenas = kfac.plan.memory(comm.rank), inside.memory(kfac)
    communicators = len(kfac.communicators)
    kfac.close()
    return seconds, communicators, sum(planned.values()), sum(arenas.values()), resident()


def resident() -> int:
    """Return the bytes of the process's resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
