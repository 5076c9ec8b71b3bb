"""Time reductions and gathers of a buffer over ranks: those of the library, and others of MPI.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/reductions.py --elements 1024 76000000
    mpirun -n 16 ... benchmarks/reductions.py --elements 4000000 --ranks_per_node 4

All variants alternate in each repetition. Milliseconds are medians over repetitions, of the slowest
rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

import mpikfac
from mpikfac.comm import Grid
from mpikfac.plan import PIECE, Layout, Message, lay_out
from mpikfac.plan.messages import gathers, in_shards, in_two_levels, seat, sums

ITEMSIZE = 4


def main() -> None:
    """Print a table for each number of elements, with a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, nargs="+", default=[76_000_000], help="of 4 bytes")
    add("--ranks_per_node", type=int, help="in two levels, too")
    add("--repetitions", type=int, default=7)
    options = parser.parse_args()
    comm = mpikfac.world()
    grid = Grid(comm, 1, mpikfac.Trace(), options.ranks_per_node)
    for elements in options.elements:
        flat = torch.ones(elements)
        seconds = measured(comm, make_ways(grid, flat, options.ranks_per_node), options.repetitions)
        if comm.rank == 0:
            print(f"{ITEMSIZE * elements / 1e6:g} MB, {comm.size} ranks")
            for name, times in seconds.items():
                print(f"{name:34s} {statistics.median(times[1:]) * 1e3:10.3f} ms", flush=True)


def measured(
    comm: MPI.Intracomm, ways: dict[str, Callable[[], object]], repetitions: int
) -> dict[str, list[float]]:
    """Return seconds of the slowest rank, by way and repetition, a warm-up first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions + 1):
        for name, reduce in ways.items():
            comm.Barrier()
            start = time.perf_counter()
            reduce()
            seconds[name].append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return seconds


def make_ways(
    grid: Grid, flat: torch.Tensor, ranks_per_node: int | None
) -> dict[str, Callable[[], object]]:
    """Return functions that sum `flat` everywhere or on segments' owners, or gather segments."""
    comm, buffer = grid.world, flat.numpy()
    segments = np.array_split(buffer, comm.size)
    counts = list(map(len, segments))
    own = np.empty_like(segments[comm.rank])
    pieces = [buffer[start : start + PIECE] for start in range(0, len(buffer), PIECE)]
    persistent = [comm.Allreduce_init(MPI.IN_PLACE, piece) for piece in pieces]

    def start_and_wait() -> None:
        for request in persistent:
            request.Start()
            request.Wait()

    ways: dict[str, Callable[[], object]] = {
        "MPI: Allreduce, whole": lambda: comm.Allreduce(MPI.IN_PLACE, buffer),
        "MPI: Allreduce, persistent": start_and_wait,
        "MPI: Reduce_scatter, whole": lambda: comm.Reduce_scatter(buffer, own, counts),
    }
    for name, messages in library(comm, len(buffer)).items():
        ways[name] = lambda messages=messages: grid.exchange(messages, flat)
        at = ranks_per_node and seat(range(comm.size), comm.rank, ranks_per_node)
        if at:
            levels = in_two_levels(messages, at, ITEMSIZE)
            ways[f"{name}, two levels"] = lambda messages=levels: grid.exchange(messages, flat)
        shards = in_shards(messages, comm.size, comm.rank, at or None, ITEMSIZE)
        if len(shards) > len(messages):
            ways[f"{name}, shards"] = lambda messages=shards: grid.exchange(messages, flat)
    return ways


def library(comm: MPI.Intracomm, elements: int) -> dict[str, list[Message]]:
    """Return messages of the library's ways."""
    edges = [elements * rank // comm.size for rank in range(comm.size + 1)]
    blocks = [(f"{rank}", (b - a,)) for rank, (a, b) in enumerate(zip(edges, edges[1:]))]
    whole, segments = lay_out([blocks]), lay_out([block] for block in blocks)

    def summed(layout: Layout, *primitive: str) -> list[Message]:
        return sums("sum", layout, lambda name: 0, comm.size, ITEMSIZE, *primitive)

    def each(name: str) -> str:  # a message for each segment
        return name

    return {
        "everywhere: Allreduce": summed(whole),
        "to owners: Reduce_scatter": summed(segments),
        "to owners: Reduce to each": sums("sum", segments, each, comm.size, ITEMSIZE),
        "to owners: Alltoall": summed(segments, "Alltoall"),
        "gather: Allgatherv": gathers(
            "gather", "world", segments, lambda name: 0, comm.rank, comm.size, ITEMSIZE
        ),
    }


if __name__ == "__main__":
    main()
