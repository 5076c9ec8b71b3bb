"""Call collectives from a thread that sleeps while it waits, so that another thread can compute.

Open MPI makes progress on non-blocking collectives only inside MPI calls, and a collective has many
rounds, each of which waits for the next check. A check takes a few microseconds; a thread that
polled without pausing would take a core from the computation.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpikfac.comm.mpi import MPI

LONGEST = 2e-4  # maximum seconds between two checks


class Patient:
    """Call a communicator's collectives, and sleep until they complete.

    The methods have MPI's names. Blocking collectives would take a core from the computation.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Call the collectives of `comm`."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def Allreduce(self, sent: Any, received: Any, op: MPI.Op | None = None) -> None:
        """All-reduce; for an in-place reduction, the buffer is copied first.

        In place, Open MPI would use a tree, whose root sends the values log2(size) times. With
        separate buffers of at least 64 KiB, each member reduces an equal shard, and no member
        sends more than twice the size of the buffer.
        """
        if sent is MPI.IN_PLACE:
            sent = np.asarray(received).copy()
        sleep_until(self._comm.Iallreduce(sent, received, op or MPI.SUM))

    def Reduce(self, sent: Any, received: Any, op: MPI.Op, root: int) -> None:
        """Reduce to member `root`."""
        sleep_until(self._comm.Ireduce(sent, received, op, root))

    def Allgather(self, sent: Any, received: Any) -> None:
        """Send this member's part to all members, and receive theirs; all parts have equal size."""
        sleep_until(self._comm.Iallgather(sent, received))

    def Alltoall(self, sent: Any, received: Any) -> None:
        """Send a part to every member, and receive one from each; all parts have equal size."""
        sleep_until(self._comm.Ialltoall(sent, received))

    def Alltoallv(self, sent: Any, received: Any) -> None:
        """Send a part of any size to every member, and receive one from each."""
        sleep_until(self._comm.Ialltoallv(sent, received))


def sleep_until(done: MPI.Request) -> None:
    """Wait for a request; between checks, sleep 1/16 of the time waited, at most `LONGEST`."""
    start = time.perf_counter()
    while not done.Test():
        time.sleep(min((time.perf_counter() - start) / 16, LONGEST))
