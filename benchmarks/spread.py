"""Measure how much the seconds of one Allreduce vary on the present network.

    bash jobs/emulated_cluster.sh up 4 --rate 100mbit
    bash jobs/emulated_cluster.sh run -n 4 python -m mpi4py benchmarks/spread.py

Predictions scale the median seconds of messages that follow each other without a pause. Where
equal messages take unequal times, a step can take longer or shorter than predicted.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

import mpikfac
from mpikfac_apps.text import table

BYTES = (2**16, 2**18, 2**20, 2**22)
MESSAGES = 30


def main() -> None:
    """Print the shortest, median and longest times of the messages of each size.

    Collective over: world.
    """
    comm = mpikfac.world()
    rows: list[tuple[str, ...]] = [("KiB", "shortest ms", "median ms", "longest ms")]
    for size in BYTES:
        seconds = messages(comm, size)
        times = (f"{1e3 * some(seconds):.0f}" for some in (min, median, max))
        rows.append((f"{size >> 10}", *times))
    if comm.rank == 0:
        print(f"Allreduce of {comm.size} ranks, {MESSAGES} messages of each size")
        print("\n".join(table(rows)), flush=True)


def messages(comm: mpikfac.comm.Comm, size: int) -> list[float]:
    """Return the seconds of each message of `size` bytes, on the rank that takes longest.

    Collective over: comm.
    """
    numbers = np.ones(size // 4, np.float32)
    totals = np.empty_like(numbers)
    mine = []
    for _ in range(MESSAGES):
        comm.Barrier()
        start = time.perf_counter()
        comm.Allreduce(numbers, totals)
        mine.append(time.perf_counter() - start)
    return [max(seconds) for seconds in zip(*comm.allgather(mine))]


if __name__ == "__main__":
    main()
