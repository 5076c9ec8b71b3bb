"""Communicate between ranks; no other folder imports mpi4py.

The training calls blocking collectives only, because Open MPI makes no progress on non-blocking
collectives outside of calls of MPI. Overlapped messages and messages of curvature ranks do not
block.
"""

from __future__ import annotations

from mpikfac.comm.agreement import agree, broadcast, clock_offset, handed_over, summed, together
from mpikfac.comm.curvature_ranks import (
    Team,
    arrivals,
    begin_receive,
    begin_send,
    leave,
    split,
    tell,
    told,
)
from mpikfac.comm.grid import Grid
from mpikfac.comm.job import (
    Comm,
    check_survivable,
    cuda_aware,
    device,
    leaving,
    lost_a_rank,
    survivors,
    world,
)
from mpikfac.comm.messages import SUMMABLE

__all__ = [
    "SUMMABLE",
    "Comm",
    "Grid",
    "Team",
    "agree",
    "arrivals",
    "begin_receive",
    "begin_send",
    "broadcast",
    "check_survivable",
    "clock_offset",
    "cuda_aware",
    "device",
    "handed_over",
    "leave",
    "leaving",
    "lost_a_rank",
    "split",
    "summed",
    "survivors",
    "tell",
    "together",
    "told",
    "world",
]
