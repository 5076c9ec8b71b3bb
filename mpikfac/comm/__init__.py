"""Communicate between ranks; no other folder imports mpi4py.

The training calls blocking collectives only, because Open MPI makes no progress on non-blocking
collectives outside of calls of MPI. Overlapped messages and messages of curvature ranks do not
block.
"""

from __future__ import annotations

from mpikfac.comm.agreement import agree, broadcast, clock_offset, handed_over, summed, together
from mpikfac.comm.curvature_ranks import (
    LEAVING,
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
from mpikfac.comm.group import Group
from mpikfac.comm.isolated import isolated_seconds
from mpikfac.comm.job import (
    Comm,
    check_survivable,
    cuda_aware,
    device,
    leaving,
    lost_a_rank,
    lowest_in_node,
    survivors,
    tells_of_loss,
    world,
)
from mpikfac.comm.messages import SUMMABLE, InOrder, Overlapped, Sender, Turns
from mpikfac.comm.servers import (
    HOLD,
    LOAD,
    MEET,
    PUSH,
    SAVE,
    Answer,
    Request,
    answer,
    ask,
    joined,
    look,
    lost,
    receive_items,
    receive_request,
    send_items,
)

__all__ = [
    "HOLD",
    "LEAVING",
    "LOAD",
    "MEET",
    "PUSH",
    "SAVE",
    "SUMMABLE",
    "Answer",
    "Comm",
    "Grid",
    "Group",
    "InOrder",
    "Overlapped",
    "Request",
    "Sender",
    "Team",
    "Turns",
    "agree",
    "answer",
    "arrivals",
    "ask",
    "begin_receive",
    "begin_send",
    "broadcast",
    "check_survivable",
    "clock_offset",
    "cuda_aware",
    "device",
    "handed_over",
    "isolated_seconds",
    "joined",
    "leave",
    "leaving",
    "look",
    "lost",
    "lost_a_rank",
    "lowest_in_node",
    "receive_items",
    "receive_request",
    "send_items",
    "split",
    "summed",
    "survivors",
    "tell",
    "tells_of_loss",
    "together",
    "told",
    "world",
]
