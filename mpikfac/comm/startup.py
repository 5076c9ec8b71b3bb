"""What a rank finds out before it trains: whether ranks are one job, its node, its GPU, its MPI."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from mpi4py import MPI

from mpikfac.errors import USAGE_ERROR, UserError

LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)


def world() -> MPI.Intracomm:
    """The communicator of all ranks, after checking that the launcher made one job of them.

    Collective over: none.

    Raises:
        SystemExit: code 2 where a launcher started N jobs of size 1; the first of them says why.
    """
    comm = MPI.COMM_WORLD
    for size_name, rank_name in LAUNCHERS:
        claimed = int(os.environ.get(size_name, 0))
        if claimed and comm.size == 1:
            if claimed > 1:
                _refuse_singletons(size_name, claimed, int(os.environ.get(rank_name, 0)))
            break
    return comm


def _refuse_singletons(name: str, claimed: int, rank: int) -> None:
    if rank == 0:
        print(
            f"mpikfac: {name}={claimed} but MPI sees 1 rank: the launcher started {claimed} "
            f"separate jobs. Use the mpirun of the MPI that mpi4py loads "
            f"({MPI.Get_library_version().split(',')[0].strip()}), or srun with its plug-in "
            f"(--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH); for one process, unset {name}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(USAGE_ERROR)


def device(comm: MPI.Intracomm, kind: str = "auto") -> torch.device:
    """This rank's device: one GPU for each rank of a node, shared in turn if there are fewer.

    Args:
        kind: "cpu", "cuda", or "auto" for CUDA where there is some.

    Collective over: comm.
    """
    local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={kind!r} but torch finds no GPU; use device='cpu'")
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def cuda_aware() -> bool:
    """Whether MPI takes device buffers; MPIKFAC_CUDA_AWARE=0 or 1 overrides its answer."""
    override = os.environ.get("MPIKFAC_CUDA_AWARE")
    if override is not None:
        return override == "1"
    if not torch.cuda.is_available():  # the library's answer is true wherever a driver loads
        return False
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libmpi.so" in line}
    queries = [getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) for path in libraries]
    return any(query is not None and query() for query in queries)


def lowest_in_node(comm: MPI.Intracomm) -> int:
    """The lowest of the ranks that share memory with this one.

    Collective over: comm.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.rank)
    node.Free()
    return int(lowest)


def check_nodes(comm: MPI.Intracomm, ranks_per_node: int) -> None:
    """Returns if ranks of one `r // ranks_per_node` share memory; a node may hold several such.

    Collective over: comm.

    Raises:
        UserError: they do not.
    """
    nodes = comm.allgather(lowest_in_node(comm))
    for rank, node in enumerate(nodes):
        first = rank - rank % ranks_per_node
        if nodes[first] != node:
            raise UserError(
                f"ranks_per_node={ranks_per_node}: ranks {first} and {rank} are on different "
                f"nodes; start ranks node by node, equally many on each, or leave it out"
            )
