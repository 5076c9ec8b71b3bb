"""Tell, when a rank's program has ended, that another rank's has not: without a line, both wait."""

from __future__ import annotations

import atexit
import os
import sys
import time
from functools import cache

from mpikfac.comm.job import Comm, survives
from mpikfac.comm.mpi import MPI
from mpikfac.errors import looks

WAIT = 60.0  # seconds; the ranks of a job may end at different times
TAG = 29_411


def expect_ends(comm: Comm, name: str) -> None:
    """Let the rank, at the end of its program, wait for the rank before in all of the job.

    A rank that takes fewer steps than the others has ended, and the others wait in a step for ever.
    No message of a step can tell, so the end does.

    Args:
        comm: the ranks that train together; only those of a whole job are expected.
        name: what takes steps, for the line.
    """
    if 1 < comm.size == MPI.COMM_WORLD.size and not survives():
        _expect(os.getpid(), name)


@cache
def _expect(process: int, name: str) -> None:
    atexit.register(_wait, process, name)


def _wait(process: int, name: str) -> None:
    if MPI.Is_finalized() or os.getpid() != process:  # a fork is no rank
        return
    world = MPI.COMM_WORLD
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = world.Isend([bytearray(1), MPI.BYTE], after, TAG)
    ended = world.Irecv([bytearray(1), MPI.BYTE], before, TAG)
    if not any(ended.Test() for _ in looks(WAIT)):
        print(
            f"mpikfac: rank {world.rank} has ended, and rank {before} has not for {WAIT:g} s; if "
            f"it waits in a step of {name}, give all ranks the same number of steps, and end the "
            f"job",
            file=sys.stderr,
            flush=True,
        )
        while not ended.Test():
            time.sleep(0.1)
    sent.Wait()
