"""Start MPI when a program first uses it, in `world()`, and not on import.

If no MPI library is found, or `torchrun` started the process, a stand-in with a single rank
replaces MPI. Communicators over process groups use the constants of this stand-in, too.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from multiprocessing import parent_process
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import distributed

from mpikfac.errors import USAGE_ERROR

LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
"""The environment variables in which launchers pass the number of ranks and the rank."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable that is set in processes that `torchrun` started."""

THREADS = 3  # THREAD_MULTIPLE: several threads can use a process group


class _Done:
    """A completed request."""

    def Test(self) -> bool:
        return True


class _Alone:
    """The communicator of a single process: nothing is sent, and reductions return their input."""

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
    """Return a copy, as if the value had been sent."""
    return pickle.loads(pickle.dumps(value))


def _alone() -> Any:
    """Return a stand-in for `mpi4py.MPI`, with what a single process or a process group needs."""
    return SimpleNamespace(
        BAND="logical and of bits",
        COMM_WORLD=_Alone(),
        COMM_TYPE_SHARED=0,
        Comm=_Alone,
        Exception=type("Exception", (RuntimeError,), {}),
        Finalize=lambda: None,
        Get_library_version=lambda: "no MPI library",
        IN_PLACE="in place",
        Intercomm=_Alone,
        Intracomm=_Alone,
        Op=SimpleNamespace(Create=lambda *_, **__: "sum of bfloat16"),
        Query_thread=lambda: THREADS,
        SUM="sum",
        THREAD_MULTIPLE=THREADS,
    )


class _OnDemand:
    """The names of `mpi4py.MPI`; the first use of any of them imports it and starts MPI.

    Under `torchrun`, and in a worker process that torch.distributed connects, MPI is not started
    here, because each process would become a separate MPI job; it is used only if the program has
    already started it.

    Attributes:
        missing: why no MPI library could be loaded; "" if one was loaded, or none was needed.
    """

    def __init__(self) -> None:
        self.missing = ""

    def __getattr__(self, name: str) -> Any:
        _refuse_in_worker()
        missing = ""
        by_torch = TORCHRUN in os.environ or (_is_worker() and connected())
        if by_torch and "mpi4py.MPI" not in sys.modules:
            library = _alone()
        else:
            try:
                from mpi4py import MPI as library
            except (ImportError, RuntimeError) as error:
                missing, library = str(error).partition("\n")[0], _alone()
        vars(self).update(vars(library), missing=missing)
        return getattr(library, name)


def _refuse_in_worker() -> None:
    """End a rank's worker process that would start MPI and thus join the job a second time.

    The server process of multiprocessing's `forkserver` also counts as a worker, because it runs
    the main program under another name.

    Raises:
        SystemExit: with code 2, after a line on stderr.
    """
    launched = any(size in os.environ for size, _ in LAUNCHERS)
    if launched and _is_worker() and not connected() and "mpi4py.MPI" not in sys.modules:
        print(
            "mpikfac: a worker process must not start MPI, which its rank has already started: "
            "call world() under if __name__ == '__main__', or in a function that no worker calls",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(USAGE_ERROR)


def _is_worker() -> bool:
    main = getattr(sys.modules.get("__mp_main__"), "__name__", "")
    return parent_process() is not None or main == "__mp_main__"


def connected() -> int:
    """Return the number of processes that torch.distributed connects, 0 before initialisation."""
    initialised = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialised else 0


if TYPE_CHECKING:
    from mpi4py import MPI
else:
    MPI = _OnDemand()


def missing() -> str:
    """Return why no MPI library could be loaded; "" if one was loaded, or none was needed."""
    return str(getattr(MPI, "missing", ""))


__all__ = ["LAUNCHERS", "MPI", "TORCHRUN", "connected", "missing"]
