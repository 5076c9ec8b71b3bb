"""Time the messages of a step as blocking, non-blocking and persistent reductions.

    OMP_NUM_THREADS=1 mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/persistent.py

A step has 1, 10 or 100 messages. Persistent requests (`Allreduce_init` of MPI 4) are made once, and
each step only starts them. All ways alternate in each repetition; times are those of the slowest
rank. "start" is the time until all messages are on their way, which a rank cannot use for anything
else; "step" ends with the last message.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI


class Way(NamedTuple):
    """How a step sends its messages: `start` returns the requests to wait for."""

    name: str
    start: Callable[[], list[MPI.Request]]


def main() -> None:
    """Print the lines of a table for the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--messages", type=int, nargs="+", default=[1, 10, 100])
    add("--bytes", type=int, nargs="+", default=[1024, 65536], help="of a message")
    add("--repetitions", type=int, default=300)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        print(f"{MPI.Get_library_version().split(',')[0]}, {comm.size} ranks; microseconds")
        print("| bytes | messages | way | start, best | median | step, best | median |")
        print("|---|---|---|---|---|---|---|")
    for size in options.bytes:
        for count in options.messages:
            ways = make_ways(comm, count, size)
            seconds = measured(comm, ways, options.repetitions)
            if comm.rank == 0:
                for way, pairs in zip(ways, seconds):
                    cells = (f"{1e6 * f(of):.0f}" for of in zip(*pairs) for f in (min, median))
                    print(f"| {size} | {count} | {way.name} | {' | '.join(cells)} |", flush=True)


median = statistics.median


def make_ways(comm: MPI.Intracomm, count: int, size: int) -> list[Way]:
    """Return the ways to reduce `count` messages of `size` bytes."""
    sent = [np.ones(size // 4, np.float32) for _ in range(count)]
    received = [np.empty_like(one) for one in sent]
    pairs = list(zip(sent, received))
    requests = [comm.Allreduce_init(*pair) for pair in pairs]

    def blocking() -> list[MPI.Request]:
        for pair in pairs:
            comm.Allreduce(*pair)
        return []

    def persistent() -> list[MPI.Request]:
        MPI.Prequest.Startall(requests)
        return requests

    return [
        Way("Allreduce", blocking),
        Way("Iallreduce", lambda: [comm.Iallreduce(*pair) for pair in pairs]),
        Way("Allreduce_init, Start", persistent),
    ]


def measured(
    comm: MPI.Intracomm, ways: list[Way], repetitions: int
) -> list[list[tuple[float, float]]]:
    """Return the seconds of start and step of each way and repetition, without a warm-up."""
    seconds: list[list[tuple[float, float]]] = [[] for _ in ways]
    for repetition in range(repetitions + 10):
        for way, times in zip(ways, seconds):
            comm.Barrier()
            begin = time.perf_counter()
            requests = way.start()
            started = time.perf_counter()
            MPI.Request.Waitall(requests)
            ended = time.perf_counter()
            slowest = np.array([started - begin, ended - begin])
            comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
            if repetition >= 10:
                times.append((slowest[0], slowest[1]))
    return seconds


if __name__ == "__main__":
    main()
