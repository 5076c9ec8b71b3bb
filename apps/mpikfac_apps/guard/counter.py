"""Count the seconds for which a rank is not stopped, and kill a rank that cannot exit by itself.

    counter.py RANK MEMORY

The rank starts this process and shares the values in `NUMBERS` with it. While the GIL is held, a
rank cannot run Python code, so it cannot distinguish being stopped from hanging by itself. This
process can: if the whole job is stopped, so is this process; if only the rank is stopped, this
process sees its state. In both cases, the time does not count. This process imports neither torch
nor MPI; it exits after the rank.
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
"""Indices of the counted seconds, the uncounted ones, and the count at which the rank is late."""
STACKS = signal.SIGSTKFLT  # makes the rank write its stacks without the GIL; unused by Linux
SET_DEATH_SIGNAL = 1  # an option of prctl
TICK = 0.1  # seconds between two checks
LONGEST = 1.0  # maximum seconds counted per check; if more have passed, this process was stopped
# In seconds after the deadline that the rank has set:
UNABLE = 1.7  # a rank that has not set a new deadline by then is holding the GIL
LAST = 3.0  # a rank that has not exited by then never will


def main() -> None:
    """Count until the rank has exited."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # this also ends a stopped process
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
    """Map the memory of a file descriptor, and return its values, float64 `[3]`."""
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
