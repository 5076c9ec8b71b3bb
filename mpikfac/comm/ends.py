"""Report that a rank's program has ended while another's has not: otherwise both would hang."""

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
    """Make the rank wait, at the end of its program, for the previous rank of the job.

    If a rank takes fewer steps than the others, it ends while the others wait in a step forever.
    No message of a step can report this, so it is reported at the end.

    Args:
        comm: the ranks that train together; only those of a whole job are expected.
        name: what takes the steps, for the message.
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
