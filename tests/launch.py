"""Starts programs under MPI for tests, as `jobs/common.sh` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil


def launch(
    ranks: int, *args: str, timeout: float = 60, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Returns how `mpirun -n ranks python -m mpi4py args...` ended, with its output.

    MPIRUN and MPIRUN_FLAGS name the launcher and its options. `env` is added to the environment.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds; no process of the job is left.
    """
    mpirun, flags = launcher()
    command = [mpirun, *flags, "-n", str(ranks), sys.executable, "-m", "mpi4py", *args]
    with subprocess.Popen(
        command,
        env=_environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            output, errors = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            _kill_tree(job.pid)
            output, errors = job.communicate()
            expired.add_note(f"{output}\n{errors}")
            raise
    return subprocess.CompletedProcess(command, job.returncode, output, errors)


def launcher() -> tuple[str, list[str]]:
    """Returns the mpirun that tests use, and its options."""
    beside_python = Path(sys.executable).with_name("mpirun")
    mpirun = os.environ.get("MPIRUN") or str(beside_python if beside_python.exists() else "mpirun")
    return mpirun, os.environ.get("MPIRUN_FLAGS", "--oversubscribe").split()


def _environment() -> dict[str, str]:
    """The defaults of jobs/common.sh, for tests that are started without it."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if "MPIRUN" not in os.environ:
        defaults |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    return defaults | dict(os.environ)


def _kill_tree(pid: int) -> None:
    # Open MPI gives each rank a process group of its own: killing the launcher's would miss them.
    family = psutil.Process(pid).children(recursive=True)
    for process in [psutil.Process(pid), *family]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
