"""Runs the cells of a study, one after the other, and notes how each ended.

STUDY/cells/CELL/run/          the run directory of the training program
STUDY/cells/CELL/output.txt    what it printed
STUDY/cells/CELL/result.json   how it ended; there once it has
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mpikfac_apps.matrix import STOPPED, Cell


@dataclass(frozen=True)
class Result:
    """How a cell's last start ended.

    Attributes:
        code: exit code; 0 when the run is complete.
        why: of a failure, the line that says most.
        seconds: from start to end of the job, start-up and evaluations included.
        cores: those that the study's own process could use.
        others: share of this machine's cores that other work took meanwhile.
    """

    code: int
    why: str
    seconds: float
    cores: int
    others: float = 0.0


def result(directory: Path) -> Result | None:
    """How the cell in this directory ended; None if it has not."""
    path = directory / "result.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


def run(cell: Cell, directory: Path, launcher: str) -> Result:
    """Runs a cell, from its newest checkpoint if it was interrupted, and notes how it ended.

    What interrupts this process ends the job, too; the cell then has no result.

    Raises:
        ValueError: there is no launcher.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "result.json").unlink(missing_ok=True)
    output, began, busy = directory / "output.txt", time.monotonic(), _others_seconds()
    code = _job(command(cell, directory, launcher), output)
    seconds, cores = time.monotonic() - began, len(os.sched_getaffinity(0))
    others = (_others_seconds() - busy) / seconds / (os.cpu_count() or 1)
    why = _why(output, code) if code else ""
    ended = Result(code, why, round(seconds, 1), cores, round(max(0.0, others), 3))
    draft = directory / "result.json.part"
    draft.write_text(json.dumps(asdict(ended)) + "\n")
    draft.replace(directory / "result.json")
    return ended


def command(cell: Cell, directory: Path, launcher: str) -> list[str]:
    """The command line of a cell's job.

    Raises:
        ValueError: there is no launcher.
    """
    own = (f"--run_dir={directory / 'run'}", "--resume=auto", f"--stop_code={STOPPED}")
    program = [sys.executable, "-m", "mpi4py", "-m", "mpikfac", "train", *cell.arguments, *own]
    if launcher == "mpirun":
        mpirun, flags = _mpirun()
        return [mpirun, *flags, "-n", str(cell.ranks), *program]
    if not shutil.which("sbatch"):
        raise ValueError("launcher=slurm needs sbatch on PATH; try launcher: mpirun")
    flags = os.environ.get("MPIRUN_FLAGS", "--mpi=pmix").split()
    step = shlex.join(["srun", *flags, *program])
    what = [f"--ntasks={cell.ranks}", f"--output={directory / 'output.txt'}"]
    return ["sbatch", "--wait", "--parsable", *what, f"--job-name={cell.strategy}", "--wrap", step]


def _mpirun() -> tuple[str, list[str]]:
    """The launcher and its flags: those of the environment, or the one that belongs to Python."""
    beside = Path(sys.executable).with_name("mpirun")
    found = os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if not found:
        raise ValueError("no mpirun is beside python or on PATH; load an MPI, or name it in MPIRUN")
    flags = os.environ.get("MPIRUN_FLAGS")
    if flags is None:  # a study may ask for more ranks than there are cores
        version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        flags = "--oversubscribe" if "Open MPI" in version else ""
    return found, flags.split()


def _job(words: list[str], output: Path) -> int:
    """The exit code of a job; one that Slurm queues is cancelled if this process is interrupted."""
    defaults = {"OMP_NUM_THREADS": "1"}  # or ranks would start a thread per core each
    if os.geteuid() == 0:  # Open MPI wants to be told twice
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    queued = words[0] == "sbatch"
    with (
        open(output, "w") as file,
        subprocess.Popen(
            words,
            env=defaults | dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if queued else file,
            stderr=file,
            text=True,
        ) as job,
    ):
        number = job.stdout.readline().strip() if job.stdout else ""
        try:
            return job.wait()
        except BaseException:
            if queued:
                subprocess.run(["scancel", number], check=False)
            job.terminate()  # mpirun ends its ranks
            raise


def _others_seconds() -> float:
    """Seconds that the machine's cores have worked, but for the jobs that this process ended."""
    _, user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.children_user - own.children_system


def _why(output: Path, code: int) -> str:
    """What the program said last about its end; launchers add lines of their own."""
    if code == STOPPED:
        return "it was asked to stop before its end"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line.startswith("mpikfac: ")] or list(filter(None, lines))
    return said[-1].removeprefix("mpikfac: ") if said else f"exit code {code}, without a word"
