"""Call collectives on a thread during computation: the thread sleeps until MPI is done.

Open MPI makes progress on non-blocking collectives only inside MPI calls, and a collective has many
rounds, each of which waits for the next check. A check takes some microseconds, and a thread that
polls would take the core from the computation.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpikfac.comm.mpi import MPI

LONGEST = 2e-4  # seconds between two looks


class Patient:
    """Call the collectives of a communicator, and sleep until they are done.

    The methods are MPI's: blocking collectives would take a core from the computation.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Call the collectives of `comm`."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def Allreduce(self, sent: Any, received: Any, op: MPI.Op | None = None) -> None:
        """Reduce on all members.

        Open MPI reduces in place by a tree, whose root sends the values log2(ranks) times; from
        64 KiB on, values in another buffer are reduced through equal shards, and no member sends
        more than twice their bytes.
        """
        if sent is MPI.IN_PLACE:
            sent = np.asarray(received).copy()
        sleep_until(self._comm.Iallreduce(sent, received, op or MPI.SUM))

    def Reduce(self, sent: Any, received: Any, op: MPI.Op, root: int) -> None:
        """Reduce on member `root`."""
        sleep_until(self._comm.Ireduce(sent, received, op, root))

    def Allgather(self, sent: Any, received: Any) -> None:
        """Gather equal parts of all members on all members."""
        sleep_until(self._comm.Iallgather(sent, received))

    def Alltoall(self, sent: Any, received: Any) -> None:
        """Send every member an equal part."""
        sleep_until(self._comm.Ialltoall(sent, received))

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """Give every member a part."""
        sleep_until(self._comm.Ialltoallv(sent, received))


def sleep_until(done: MPI.Request) -> None:
    """Wait for the request: check again after a 16th of the time waited so far, or `LONGEST`."""
    start = time.perf_counter()
    while not done.Test():
        time.sleep(min((time.perf_counter() - start) / 16, LONGEST))
