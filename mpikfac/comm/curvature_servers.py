"""Connect training ranks to curvature servers with an intercommunicator.

Factors and decompositions are sent in non-blocking messages, which make progress only while
both sides are inside MPI calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from mpikfac.comm.job import Comm, world
from mpikfac.comm.messages.buffers import MAX_COUNT, pieces
from mpikfac.comm.mpi import MPI
from mpikfac.comm.process_group import ProcessGroupComm

LEAVING = 2**15 - 1  # the highest tag that every MPI library supports
LOOK_EVERY = 1e-3  # seconds between two checks for a message, on an idle server


@dataclass(frozen=True)
class SplitComm:
    """The communicator of the training ranks, and the intercommunicator to the curvature servers.

    Attributes:
        comm: the communicator of the training ranks; None on a curvature server.
        intercomm: connects training ranks and curvature servers; None if all ranks train.
    """

    comm: MPI.Intracomm | None
    intercomm: MPI.Intercomm | None = None

    @classmethod
    def of(cls, comm: Comm | SplitComm | None) -> SplitComm:
        """Return `comm` as a `SplitComm` in which all ranks train; None means all ranks of the job.

        Raises:
            ValueError: `comm` is not a communicator.
        """
        if isinstance(comm, SplitComm):
            return comm
        comm = world() if comm is None else comm
        if not hasattr(comm, "allgather") or isinstance(comm, ProcessGroup):
            raise ValueError(
                f"comm={comm!r} must be a communicator of mpi4py, mpikfac.over(group), a "
                f"SplitComm, or None"
            )
        return cls(comm)

    @property
    def trains(self) -> MPI.Intracomm:
        """The communicator of the training ranks, on a training rank.

        Raises:
            ValueError: this rank does not train, or the `SplitComm` contains no communicator.
        """
        if self.comm is None and self.intercomm is None:
            raise ValueError("comm=None must be a communicator, such as mpikfac.world()")
        if self.comm is None:
            raise ValueError(
                "this rank does not train; call mpikfac.lab.run_curvature_server(team) on it"
            )
        return self.comm

    @property
    def size(self) -> int:
        """The number of training ranks."""
        if self.comm is not None:
            return self.comm.size
        return 0 if self.intercomm is None else self.intercomm.remote_size


def split_comm(comm: MPI.Intracomm, curvature_servers: int) -> SplitComm:
    """Return a `SplitComm` of `comm`, whose last `curvature_servers` ranks serve; the others train.

        team = mpikfac.split_comm(comm, curvature_servers=1)
        if team.comm is None:
            mpikfac.lab.run_curvature_server(team)
        else:
            strategy = mpikfac.Strategy(refresh=mpikfac.lab.CurvatureServers(servers=1))
            kfac = mpikfac.KFAC(model, optimizer, team, strategy)
            ...
            kfac.close()

    Collective over: comm.

    Raises:
        ValueError: no rank would train, or `comm` is not an MPI communicator.
    """
    if not 0 <= curvature_servers < comm.size:
        raise ValueError(
            f"curvature_servers={curvature_servers} must be less than the number of ranks "
            f"({comm.size})"
        )
    if curvature_servers == 0:
        return SplitComm(comm)
    if isinstance(comm, ProcessGroupComm):
        raise ValueError(
            f"curvature_servers={curvature_servers}: CurvatureServers and ParameterServer need an "
            f"intercommunicator, which torch.distributed lacks; start the program with mpirun"
        )
    first = comm.size - curvature_servers
    trains = comm.rank < first
    side = cast(MPI.Intracomm, comm.Split(color=int(trains), key=comm.rank))
    link = side.Create_intercomm(0, comm, first if trains else 0)
    return SplitComm(side if trains else None, link)


def announce(curvature: MPI.Intercomm, value: object) -> None:
    """Send training rank 0's `value` to all curvature servers, which must call `announced`.

    Collective over: curvature.
    """
    curvature.bcast(value, root=MPI.PROC_NULL if curvature.rank else MPI.ROOT)


def announced(curvature: MPI.Intercomm) -> Any:
    """Return the value that training rank 0 passes to `announce`; call it on curvature servers.

    Collective over: curvature.
    """
    return curvature.bcast(None, root=0)


def begin_send(comm: MPI.Comm, flat: Tensor, to: int, tag: int) -> Callable[[], object]:
    """Start sending `flat`, in host memory, and return a function that waits until it is sent.

    `flat` must not change until that function returns. Collective over: none.
    """
    parts = pieces(np.from_dlpack(flat), 0, len(flat), MAX_COUNT)
    requests = [comm.Isend(part, dest=to, tag=tag) for part in parts]
    return lambda: MPI.Request.Waitall(requests)


def begin_receive(comm: MPI.Comm, flat: Tensor, source: int, tag: int) -> Callable[[], object]:
    """Start receiving `flat`, in host memory, and return a function that waits until it arrives.

    Collective over: none.
    """
    parts = pieces(flat.numpy(), 0, len(flat), MAX_COUNT)
    requests = [comm.Irecv(part, source=source, tag=tag) for part in parts]
    return lambda: MPI.Request.Waitall(requests)


def arrivals(curvature: MPI.Intercomm) -> Iterator[tuple[int, int]]:
    """Yield the source and tag of every arriving message, until all training ranks have left.

    Training ranks leave by calling `leave`. The caller must receive a message before it requests
    the next one. The server sleeps between two checks for messages, because waiting inside MPI
    would keep a core busy, possibly that of a training rank.

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
    """Tell the curvature servers that this rank leaves; their `arrivals` end when all have left.

    Uses point-to-point messages, because Open MPI's Ibarrier on an intercommunicator releases some
    ranks before all have arrived.

    Collective over: none.
    """
    for rank in range(curvature.remote_size):
        curvature.Send(b"", dest=rank, tag=LEAVING)
