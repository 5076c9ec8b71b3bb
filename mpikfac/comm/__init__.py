"""Everything that communicates; the only importer of mpi4py.

- `startup`: what a rank finds out before it trains
- `agreement`: what all ranks come to share
- `survival`: going on when a rank dies
- `intercomm`: what joins ranks that train and curvature ranks
- `grid`: the ranks as a grid, and collectives on arenas; it stands on
  - `primitives`: MPI's collectives, as a plan's messages ask for them
  - `encoded`: collectives of encoded numbers
  - `beside`: sums that are sent beside the computation
  - `buffers`: what MPI reads and writes

The training calls blocking collectives only: Open MPI makes no progress on others unless it is
called. What is sent beside the computation, and to curvature ranks and back, does not block.
"""

from __future__ import annotations

from mpikfac.comm.agreement import agree, broadcast, clock_offset, summed, together
from mpikfac.comm.buffers import SUMMABLE
from mpikfac.comm.grid import Grid
from mpikfac.comm.intercomm import (
    arrivals,
    begin_receive,
    begin_send,
    leave,
    split,
    tell,
    told,
)
from mpikfac.comm.startup import cuda_aware, device, world
from mpikfac.comm.survival import check_survivable, leaving, lost_a_rank, survivors

__all__ = [
    "SUMMABLE",
    "Grid",
    "agree",
    "arrivals",
    "begin_receive",
    "begin_send",
    "broadcast",
    "check_survivable",
    "clock_offset",
    "cuda_aware",
    "device",
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
