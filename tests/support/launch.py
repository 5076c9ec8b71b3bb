"""Start programs under MPI for tests, as `jobs/common.sh` does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO

import psutil

from support.pace import paced

LIMIT = 240  # seconds at pace 1, to catch hangs: jobs take less than 30 on an idle machine
PROGRAMS = Path(__file__).parents[1] / "programs"
NOT_STARTED = "The PMIx server's listener thread failed to start."
"""What Open MPI's launcher prints if it gives up before any rank starts, once in thousands."""
TRAIN = ("-m", "mpikfac_apps", "train")
"""The training program, as arguments of `launch`."""


def launch(
    ranks: int, *args: str, timeout: float = LIMIT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `mpirun -n ranks python -m mpi4py args...`; return its exit code and its output.

    A launcher that has not started any rank is started once more. MPIRUN and MPIRUN_FLAGS set the
    launcher and its options. `env` is added to the environment.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds at the machine's pace; no process of the
            job is left.
    """
    ended = _ended(start(ranks, *args, env=env), timeout)
    if NOT_STARTED in ended.stderr:
        ended = _ended(start(ranks, *args, env=env), timeout)
    return ended


def torchrun(ranks: int, *args: str, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Return the end of `torchrun --nproc-per-node ranks args...`, with the job's output.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds at the machine's pace; no process of the
            job is left.
    """
    run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return _ended(_begun([sys.executable, *run, *args]), timeout)


def _ended(job: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Return the result of a job that has been started; see `launch`."""
    with job:
        try:
            output, errors = job.communicate(timeout=paced(timeout))
        except subprocess.TimeoutExpired as expired:
            kill(job)
            output, errors = job.communicate()
            expired.add_note(f"{output}\n{errors}")
            raise
    # Open MPI ends its own notes with a NUL byte, which can precede a rank's line.
    texts = (text.replace("\0", "") for text in (output, errors))
    return subprocess.CompletedProcess(job.args, job.returncode, *texts)


def run_each(runs: Sequence[tuple[int, Sequence[str]]], root: Path, timeout: float = LIMIT) -> None:
    """Run the training program several times, one run after another.

    All runs share one job, because a short run spends most of its time on starting its ranks.

    Args:
        runs: the number of ranks and the options of each run.
        root: a directory for the list of the runs.
    """
    program, file = str(PROGRAMS / "several.py"), root / "runs.json"
    file.write_text(json.dumps(runs))
    ended = launch(max(ranks for ranks, _ in runs), program, str(file), timeout=timeout)
    assert ended.returncode == 0, ended.stderr


def start(
    ranks: int, *args: str, env: dict[str, str] | None = None, output: int | IO[str] = PIPE
) -> subprocess.Popen[str]:
    """Start the job of `launch`; output goes to pipes, or together to `output`."""
    mpirun, flags = launcher()
    command = [mpirun, *flags, "-n", str(ranks), sys.executable, "-m", "mpi4py", *args]
    return _begun(command, env, output)


def _begun(
    command: Sequence[str], env: dict[str, str] | None = None, output: int | IO[str] = PIPE
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        text=True,
    )


def processes(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes of an Open MPI job's ranks, in order."""
    ranks = psutil.Process(job.pid).children()
    return sorted(ranks, key=lambda rank: int(rank.environ()["OMPI_COMM_WORLD_RANK"]))


def kill(job: subprocess.Popen[str]) -> None:
    """End the job with all ranks."""
    # Open MPI gives every rank its own process group, so killing the launcher's would miss ranks.
    family = psutil.Process(job.pid).children(recursive=True)
    for process in [psutil.Process(job.pid), *family]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=paced(10))


def launcher() -> tuple[str, list[str]]:
    """Return the mpirun of the tests, and its options."""
    beside_python = Path(sys.executable).with_name("mpirun")
    mpirun = os.environ.get("MPIRUN") or str(beside_python if beside_python.exists() else "mpirun")
    return mpirun, os.environ.get("MPIRUN_FLAGS", "--oversubscribe").split()


def environment() -> dict[str, str]:
    """Return the defaults of jobs/common.sh, for tests started without it."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if "MPIRUN" not in os.environ:
        defaults |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    return defaults | dict(os.environ)
