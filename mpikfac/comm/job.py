"""Examine the job: its launcher, nodes and GPUs, MPI's features, and ranks that have died."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, TypeAlias, cast

import torch

from mpikfac.comm.mpi import LAUNCHERS, MPI, TORCHRUN, connected, missing
from mpikfac.comm.process_group import ProcessGroupComm, over
from mpikfac.errors import PATIENCE, USAGE_ERROR, UserError, looks

Comm: TypeAlias = "MPI.Intracomm"
"""An intracommunicator of mpi4py, or a communicator that `over` returns."""


class Maker(NamedTuple):
    """Describe a GPU vendor: torch's device type, and how to ask MPI about device buffers.

    Attributes:
        kind: torch's device type for the GPUs.
        queries: functions of Open MPI and MPICH that return whether MPI accepts device buffers.
    """

    kind: str
    queries: tuple[str, ...]


NVIDIA = Maker("cuda", ("MPIX_Query_cuda_support",))
AMD = Maker("cuda", ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"))  # Open MPI, MPICH
INTEL = Maker("xpu", ("MPIX_Query_ze_support",))
MAKERS = (AMD if torch.version.hip else NVIDIA, INTEL)

REMEDY = "install one with pip install 'mpikfac[mpi]', or load the module of your site's MPI"

log = logging.getLogger("mpikfac")


def world() -> MPI.Intracomm:
    """Start MPI, and return the communicator of all ranks.

    If torch.distributed connects several processes and MPI does not, return a communicator over
    its process group (see `over`). Otherwise, if no MPI library is found, the process runs alone,
    and a warning is logged.

    Collective over: none.

    Raises:
        ValueError: the process group of torch.distributed cannot send host memory.
        SystemExit: with code 2, after a line on stderr with the reason: `torchrun` started
            processes that are not connected yet, a launcher started N jobs of size 1, or this is a
            worker process, such as one of a data loader.
    """
    comm = MPI.COMM_WORLD
    if comm.size == 1 and connected() > 1:
        return over()
    if TORCHRUN in os.environ and comm.size == 1 and int(os.environ["WORLD_SIZE"]) > 1:
        _refuse_unconnected(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    for size_name, rank_name in LAUNCHERS:
        claimed = int(os.environ.get(size_name, "0"))
        if claimed and comm.size == 1:
            if claimed > 1:
                _refuse_singletons(size_name, claimed, int(os.environ.get(rank_name, "0")))
            break
    if missing():
        _tell_alone()
    return comm


@cache
def _tell_alone() -> None:
    log.warning("%s: this process runs alone; for several ranks, %s", missing(), REMEDY)


def _refuse_unconnected(claimed: int, rank: int) -> None:
    if rank == 0:
        print(
            f"mpikfac: torchrun started {claimed} processes, which are not connected: call "
            f"torch.distributed.init_process_group before K-FAC, or start the program with mpirun",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(USAGE_ERROR)


def _refuse_singletons(name: str, claimed: int, rank: int) -> None:
    if rank == 0 and missing():
        text = f"{name}={claimed}, but several ranks need MPI ({missing()}): {REMEDY}"
        print(f"mpikfac: {text}", file=sys.stderr, flush=True)
    elif rank == 0 and TORCHRUN in os.environ:
        print(
            f"mpikfac: {name}={claimed}, but MPI is not started in the processes of torchrun, and "
            f"{TORCHRUN} is set: unset {TORCHRUN} for {claimed} ranks, or "
            f"{name} for one process",
            file=sys.stderr,
            flush=True,
        )
    elif rank == 0:
        print(
            f"mpikfac: {name}={claimed} but MPI sees 1 rank: the launcher started {claimed} "
            f"separate jobs. Use the mpirun of the MPI that mpi4py loads "
            f"({MPI.Get_library_version().split(',')[0].strip()}), or srun with its plug-in "
            f"(--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH); for one process, unset {name}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(USAGE_ERROR)


def check_connected(comm: Comm) -> None:
    """Check that a communicator's job includes all processes that torch.distributed connects.

    Collective over: none.

    Raises:
        ValueError: torch.distributed connects more processes than MPI, which therefore cannot
            average over all of them.
    """
    if connected() > 1 and not isinstance(comm, ProcessGroupComm):
        ranks = MPI.COMM_WORLD.size
        if connected() > ranks:
            raise ValueError(
                f"torch.distributed connects {connected()} processes, but MPI connects {ranks}: "
                f"pass comm=mpikfac.over(), or start the program with mpirun"
            )


def device(comm: MPI.Intracomm, kind: str = "auto") -> torch.device:
    """Return this rank's device; a node's GPUs are assigned to its ranks in round-robin order.

    Args:
        kind: "cpu", torch's device type for the GPUs ("cuda", also for ROCm, or "xpu"), or "auto"
            to use GPUs if torch finds any.

    Collective over: comm.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.rank
    node.Free()
    maker = _maker()
    if kind == "cpu" or (kind == "auto" and maker is None):
        return torch.device("cpu")
    if maker is None:
        raise ValueError(f"device={kind!r}, but torch finds no GPU; use device='cpu'")
    if kind not in ("auto", maker.kind):
        raise ValueError(f"device={kind!r}, but torch finds a GPU of type {maker.kind!r}")
    chosen = torch.device(maker.kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def cuda_aware(comm: Comm | None = None) -> bool:
    """Return whether MPI, or a process group `comm`, accepts device buffers.

    The environment variable MPIKFAC_CUDA_AWARE (0 or 1) overrides the result.
    """
    override = os.environ.get("MPIKFAC_CUDA_AWARE")
    if override is not None:
        return override == "1"
    if isinstance(comm, ProcessGroupComm):
        return comm.direct
    maker = _maker()
    if maker is None:  # without a GPU, MPI's query still returns true if MPI can load a driver
        return False
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libmpi.so" in line}
    queries = (getattr(ctypes.CDLL(path), q, None) for path in libraries for q in maker.queries)
    return any(query is not None and query() for query in queries)


def _maker() -> Maker | None:
    """Return the vendor of the GPUs that torch finds, or None if no GPU has a known vendor."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return next((maker for maker in MAKERS if accelerator and maker.kind == accelerator.type), None)


def lowest_in_node(comm: MPI.Intracomm) -> int:
    """Return the lowest rank that shares memory with this rank.

    Collective over: comm.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.rank)
    node.Free()
    return int(lowest)


def check_nodes(comm: MPI.Intracomm, ranks_per_node: int) -> None:
    """Check that ranks with the same `rank // ranks_per_node` share memory.

    A node can hold several groups of `ranks_per_node` ranks.

    Collective over: comm.

    Raises:
        UserError: the ranks of a group are on different nodes.
    """
    nodes = comm.allgather(lowest_in_node(comm))
    for rank, node in enumerate(nodes):
        first = rank - rank % ranks_per_node
        if nodes[first] != node:
            raise UserError(
                f"ranks_per_node={ranks_per_node}: ranks {first} and {rank} are on different "
                f"nodes; start the same number of ranks on each node, node by node, or leave out "
                f"ranks_per_node"
            )


def check_survivable() -> None:
    """Check that the other ranks can continue after a rank dies.

    Collective over: none.

    Raises:
        ValueError: this MPI library, or the way in which the job was started, does not allow this;
            the message states the remedy.
    """
    if survives():
        return
    library = MPI.Get_library_version().split(",")[0].strip()
    raise ValueError(
        f"if a rank dies, {library}, as started here, ends the whole job; use Open MPI 5, and "
        f"start the job with mpirun --with-ft ulfm"
    )


def lost_a_rank(comm: MPI.Intracomm, error: BaseException) -> bool:
    """Return whether the death of a rank caused `error`.

    This includes errors raised after another rank detected the death and revoked the communicator.

    Collective over: none.
    """
    if isinstance(error, MPI.Exception):
        return tells_of_loss(error)
    # If a rank dies in a collective, Open MPI can return without an error. The received values
    # are then undefined, and Open MPI reports the death later.
    for _ in looks(PATIENCE):
        if comm.Is_revoked() or comm.Get_failed().size > 0:
            return True
        if isinstance(error, UserError):
            break
    return False


def tells_of_loss(error: BaseException) -> bool:
    """Return whether an MPI error reports that a rank died or a communicator was revoked."""
    signs = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
    return isinstance(error, MPI.Exception) and error.Get_error_class() in signs


def survivors(comm: MPI.Intracomm, communicators: Iterable[MPI.Comm]) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks, in their previous order.

    Every surviving rank must call this function. Ranks that still wait in `comm` or in one of
    `communicators` get an error.

    Collective over: the surviving ranks of comm.
    """
    for part in communicators:
        part.Revoke()
    comm.Revoke()
    return cast(MPI.Intracomm, comm.Shrink())


def leaving(code: int) -> int:
    """Return `code`, with which this rank can then exit without ending the other ranks.

    If `code` is not 0, MPI is finalised before this function returns. After the death of a rank,
    however, the process exits without finalising MPI, which might wait for the dead rank forever.

    Collective over: the surviving ranks.
    """
    if survives() and MPI.COMM_WORLD.Get_failed().size:
        atexit.register(_leave_without_mpi, code)
    elif code:
        MPI.Finalize()
    return code


def _leave_without_mpi(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def survives() -> bool:
    """Return whether MPI lets the other ranks continue when a rank dies."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 (Open MPI's spelling)
