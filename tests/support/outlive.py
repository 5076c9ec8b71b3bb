"""Let the process of the tests outlive a program that runs in it and fails."""

from __future__ import annotations

from types import SimpleNamespace

from pytest import MonkeyPatch

import mpikfac
from mpikfac import errors


class Ranks(SimpleNamespace):
    """What `abort_on_error` needs of a communicator, except that nothing is aborted."""

    def Abort(self, errorcode: int = 0) -> None:
        """Return, so that `abort_on_error` raises SystemExit."""


def outlive(monkeypatch: MonkeyPatch) -> None:
    """Keep a program that fails from ending MPI or the process."""

    def abort_on_error(comm, *where):
        ranks = Ranks(rank=comm.rank, size=comm.size, Ibarrier=comm.Ibarrier)
        return errors.abort_on_error(ranks, *where)

    monkeypatch.setattr("mpikfac.comm.mpi.MPI.Finalize", lambda: None)
    monkeypatch.setattr(mpikfac, "abort_on_error", abort_on_error)
