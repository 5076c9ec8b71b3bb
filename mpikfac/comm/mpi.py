"""Load MPI; where no MPI library is found, provide the calls of a process that works alone."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

MISSING = ""
"""Why no MPI library was loaded; "" with MPI."""


class _Done:
    """A request that is done."""

    def Test(self) -> bool:
        return True


class _Alone:
    """The communicator of a single process: messages go nowhere, and sums are there already."""

    rank, size, name = 0, 1, "alone"

    def allgather(self, value: object) -> list[object]:
        return [_copied(value)]

    def gather(self, value: object, root: int = 0) -> list[object]:
        return [_copied(value)]

    def scatter(self, values: Sequence[object], root: int = 0) -> object:
        return _copied(values[0])

    def bcast(self, value: object, root: int = 0) -> object:
        return value

    def Split(self, color: int = 0, key: int = 0) -> _Alone:
        return _Alone()

    def Split_type(self, kind: int) -> _Alone:
        return _Alone()

    def Create_cart(self, sides: Sequence[int]) -> _Alone:
        return _Alone()

    def Sub(self, remain_dims: Sequence[bool]) -> _Alone:
        return _Alone()

    def Barrier(self) -> None: ...

    def Ibarrier(self) -> _Done:
        return _Done()

    def Bcast(self, buffer: object, root: int = 0) -> None: ...

    def Free(self) -> None: ...

    def Abort(self, errorcode: int = 0) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode)


def _copied(value: object) -> object:
    """Return a copy, as messages make copies."""
    return pickle.loads(pickle.dumps(value))


def _alone() -> Any:
    """Return the names of `mpi4py.MPI` that a process alone needs."""
    return SimpleNamespace(
        COMM_WORLD=_Alone(),
        COMM_TYPE_SHARED=0,
        Comm=_Alone,
        Exception=type("Exception", (RuntimeError,), {}),
        Finalize=lambda: None,
        Get_library_version=lambda: "no MPI library",
        IN_PLACE=None,
        Intercomm=_Alone,
        Intracomm=_Alone,
        Op=SimpleNamespace(Create=lambda *_, **__: None),
        SUM=None,
    )


if TYPE_CHECKING:
    from mpi4py import MPI
else:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        MISSING = str(error).partition("\n")[0]
        MPI = _alone()

__all__ = ["MISSING", "MPI"]
