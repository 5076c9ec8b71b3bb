"""Count the seconds in which a rank runs, and end a rank that cannot end itself.

    counter.py RANK MEMORY

The rank starts this process, and both share the numbers of `NUMBERS`. A rank that holds the GIL
runs no line of Python, so the rank itself cannot tell a stop from a hang. This process is stopped
together with the job, or sees that the rank is stopped. Such time does not count. The process
imports neither torch nor MPI, and leaves after the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
from contextlib import suppress

NUMBERS = NOW, STOPPED, DEADLINE = range(3)
"""Counted seconds, seconds that do not count, and the count at which the rank has to report."""
STACKS = signal.SIGSTKFLT  # asks the rank for its stacks, without the GIL; Linux sends it never
SET_DEATH_SIGNAL = 1  # of prctl
TICK = 0.1  # seconds between two looks
LONGEST = 1.0  # seconds of a look; the rest of a longer look is time in which nothing ran
# Seconds after the deadline.
UNABLE = 1.7  # a rank that has written no report until now holds the GIL
LAST = 3.0  # by now a rank has left, or never will


def main() -> None:
    """Count until the rank has left."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # a stopped process ends, too
    rank, memory = map(int, sys.argv[1:])
    numbers = shared(memory)
    before, asked = time.monotonic(), False
    while os.getppid() == rank:
        time.sleep(TICK)
        now = time.monotonic()
        counted = 0.0 if is_stopped(rank) else min(now - before, LONGEST)
        numbers[NOW] += counted
        numbers[STOPPED] += now - before - counted
        before, late = now, numbers[NOW] - numbers[DEADLINE]
        with suppress(ProcessLookupError):
            if late > UNABLE and not asked:
                os.kill(rank, STACKS)
            if late > LAST:
                os.kill(rank, signal.SIGKILL)
        asked = late > UNABLE


def shared(memory: int) -> memoryview[float]:
    """Return the numbers in the memory of a descriptor, float64 `[3]`."""
    return memoryview(mmap.mmap(memory, 0)).cast("d")


def is_stopped(process: int) -> bool:
    """Return whether a process is stopped, by a signal or by a debugger."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:  # the process has ended
        return False


if __name__ == "__main__":
    main()
