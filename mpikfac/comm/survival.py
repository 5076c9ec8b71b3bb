"""Going on when a rank dies, by Open MPI's user-level failure mitigation (ULFM)."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import cast

from mpi4py import MPI

from mpikfac.comm.grid import Grid
from mpikfac.errors import PATIENCE, UserError


def check_survivable() -> None:
    """Returns if the job outlives a rank, so that the others can go on.

    Collective over: none.

    Raises:
        ValueError: MPI or the way it was started does not allow it; what to do.
    """
    if _survives():
        return
    library = MPI.Get_library_version().split(",")[0].strip()
    raise ValueError(
        f"a job of {library}, started like this, ends when a rank dies; "
        f"use Open MPI 5 and start it by mpirun --with-ft ulfm"
    )


def lost_a_rank(comm: MPI.Intracomm, error: BaseException) -> bool:
    """Whether the error says or stems from that a rank has died, or that others have found so.

    Collective over: none.
    """
    if isinstance(error, MPI.Exception):
        signs = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
        return error.Get_error_class() in signs
    # Open MPI may return from a collective in which a rank died as if all were well; what it
    # received then is anything, and the word of the death comes later.
    deadline = time.monotonic() + PATIENCE
    while not (lost := comm.Is_revoked() or comm.Get_failed().size > 0):
        if isinstance(error, UserError) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return lost


def survivors(comm: MPI.Intracomm, *grids: Grid) -> MPI.Intracomm:
    """A communicator of the ranks that are left, in their order; to be called by all of them.

    Ranks that still wait in `comm` or in one of `grids` are woken with an error.

    Collective over: the ranks of comm that are left.
    """
    for grid in grids:
        for part in grid.communicators:
            part.Revoke()
    comm.Revoke()
    return cast(MPI.Intracomm, comm.Shrink())


def leaving(code: int) -> int:
    """The exit code `code`, with MPI ended: a rank that then leaves with it ends no other one.

    Where ranks were lost the process ends without MPI, which may wait for them for ever.

    Collective over: the ranks that are left.
    """
    if _survives() and MPI.COMM_WORLD.Get_failed().size:
        atexit.register(_leave_without_mpi, code)
    elif code:
        MPI.Finalize()
    return code


def _leave_without_mpi(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _survives() -> bool:
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 (its name is like this)
