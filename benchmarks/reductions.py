"""Ways to sum a large buffer over ranks: whole, and in pieces.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/reductions.py

Milliseconds are medians over repetitions, in which all ways take turns, of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpikfac


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=76_000_000, help="of 4 bytes")
    parser.add_argument("--piece", type=int, default=2**22, help="elements reduced at once")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    comm = mpikfac.world()
    ways = make_ways(comm, np.ones(options.elements, np.float32), options.piece)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repetitions + 1):
        for name, reduce in ways.items():
            comm.Barrier()
            start = time.perf_counter()
            reduce()
            seconds[name].append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    if comm.rank == 0:
        print(f"{4 * options.elements / 1e6:.0f} MB, {comm.size} ranks")
        for name, times in seconds.items():
            print(f"{name:28s} {statistics.median(times[1:]) * 1e3:8.1f} ms")


def make_ways(comm: MPI.Intracomm, buffer: np.ndarray, count: int) -> dict[str, Callable[[], None]]:
    """Functions that sum `buffer`, on everyone or on the owner of each segment."""
    segments = np.array_split(buffer, comm.size)
    own = np.empty_like(segments[comm.rank])

    def pieces(array: np.ndarray) -> list[np.ndarray]:
        return [array[start : start + count] for start in range(0, len(array), count)]

    def everyone() -> None:
        for piece in pieces(buffer):
            comm.Allreduce(MPI.IN_PLACE, piece)

    def owners() -> None:
        for owner, segment in enumerate(segments):
            for piece in pieces(segment):
                mine = owner == comm.rank
                comm.Reduce(MPI.IN_PLACE if mine else piece, piece if mine else None, root=owner)

    return {
        "Allreduce, whole": lambda: comm.Allreduce(MPI.IN_PLACE, buffer),
        "Allreduce, in pieces": everyone,
        "Reduce_scatter, whole": lambda: comm.Reduce_scatter(buffer, own, list(map(len, segments))),
        "Reduce to owners, in pieces": owners,
    }


if __name__ == "__main__":
    main()
