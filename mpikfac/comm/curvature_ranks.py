"""What joins ranks that train and curvature ranks: an inter-communicator, and messages over it.

Factors and bases do not block on their way; they move on while both sides are in some call of MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from mpi4py import MPI
from torch import Tensor

from mpikfac.comm.buffers import MAX_COUNT, pieces

LEAVING = 2**15 - 1  # the highest tag that every MPI has
LOOK_EVERY = 1e-3  # seconds between two looks for a message, of a rank that has nothing else to do


@dataclass(frozen=True)
class Team:
    """The ranks that train, and the link to the ranks that decompose for them.

    Attributes:
        comm: the communicator of the training ranks; None on a curvature rank.
        link: joins training ranks and curvature ranks; None where all ranks train.
    """

    comm: MPI.Intracomm | None
    link: MPI.Intercomm | None = None

    @property
    def size(self) -> int:
        """The number of ranks that train."""
        if self.comm is not None:
            return self.comm.size
        return 0 if self.link is None else self.link.remote_size


def split(comm: MPI.Intracomm, curvature_ranks: int) -> Team:
    """Return the team of training ranks, and make the last ranks of `comm` curvature ranks.

        team = mpikfac.split(comm, curvature_ranks=1)
        if team.comm is None:
            mpikfac.serve(team)
        else:
            strategy = Strategy.comm_opt(team.size, delay=1, curvature_ranks=1)
            kfac = KFAC(model, optimizer, team, strategy)
            ...
            kfac.close()

    Collective over: comm.

    Raises:
        ValueError: no rank would train.
    """
    if not 0 <= curvature_ranks < comm.size:
        raise ValueError(
            f"curvature_ranks={curvature_ranks} must be less than the number of ranks ({comm.size})"
        )
    if curvature_ranks == 0:
        return Team(comm)
    first = comm.size - curvature_ranks
    trains = comm.rank < first
    own = cast(MPI.Intracomm, comm.Split(color=int(trains), key=comm.rank))
    link = own.Create_intercomm(0, comm, first if trains else 0)
    return Team(own if trains else None, link)


def tell(curvature: MPI.Intercomm, value: object) -> None:
    """Gives all curvature ranks training rank 0's `value`, for which they call `told`.

    Collective over: curvature.
    """
    curvature.bcast(value, root=MPI.PROC_NULL if curvature.rank else MPI.ROOT)


def told(curvature: MPI.Intercomm) -> Any:
    """What training rank 0 tells this curvature rank.

    Collective over: curvature.
    """
    return curvature.bcast(None, root=0)


def begin_send(comm: MPI.Comm, flat: Tensor, to: int, tag: int) -> Callable[[], object]:
    """Starts to send `flat`, on the host; returns what waits until it is sent.

    It must not change until then. Collective over: none.
    """
    parts = pieces(flat.numpy(), 0, len(flat), MAX_COUNT)
    requests = [comm.Isend(part, dest=to, tag=tag) for part in parts]
    return lambda: MPI.Request.Waitall(requests)


def begin_receive(comm: MPI.Comm, flat: Tensor, source: int, tag: int) -> Callable[[], object]:
    """Starts to receive `flat`, on the host; returns what waits until it is there.

    Collective over: none.
    """
    parts = pieces(flat.numpy(), 0, len(flat), MAX_COUNT)
    requests = [comm.Irecv(part, source=source, tag=tag) for part in parts]
    return lambda: MPI.Request.Waitall(requests)


def arrivals(curvature: MPI.Intercomm) -> Iterator[tuple[int, int]]:
    """Source and tag of each message that comes, in turn, until all training ranks `leave`.

    It has to be received before the next one is asked for. Between two looks the rank sleeps: in a
    call of MPI it would keep a core busy, perhaps one of a rank that trains.

    Collective over: none.
    """
    left, status = 0, MPI.Status()
    while left < curvature.remote_size:
        if not curvature.Iprobe(status=status):
            time.sleep(LOOK_EVERY)
        elif status.tag == LEAVING:
            curvature.Recv(bytearray(), source=status.source, tag=LEAVING)
            left += 1
        else:
            yield status.source, status.tag


def leave(curvature: MPI.Intercomm) -> None:
    """Ends the curvature ranks' `arrivals`, once all training ranks have called this.

    Message by message: Open MPI's Ibarrier between two groups lets some go before all have come.

    Collective over: none.
    """
    for rank in range(curvature.remote_size):
        curvature.Send(b"", dest=rank, tag=LEAVING)
