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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpikfac_apps.options.options import Options
from mpikfac_apps.study import curves
from mpikfac_apps.study.spec import STOPPED, Cell

PATIENCE = 60.0  # seconds that a job may take to end


@dataclass(frozen=True)
class Result:
    """How a cell's last start ended.

    Attributes:
        code: exit code; 0 when the run is complete.
        why: of a failure, the line that says most.
        seconds: from start to end of the job, start-up and evaluations included.
        cores: those that the study's own process could use; None of a job that Slurm queued.
        others: share of this machine's cores that other work took meanwhile; likewise.
    """

    code: int
    why: str
    seconds: float
    cores: int | None = None
    others: float | None = None


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
    seconds = time.monotonic() - began
    why = _why(output, code) if code else _missing(directory / "run", cell.options)
    ended = Result(code or (1 if why else 0), why, round(seconds, 1))
    if launcher == "mpirun":
        others = (_others_seconds() - busy) / seconds / (os.cpu_count() or 1)
        cores = len(os.sched_getaffinity(0))
        ended = replace(ended, cores=cores, others=round(max(0.0, others), 3))
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
    program = [sys.executable, "-m", "mpi4py", "-m", "mpikfac_apps", "train", *cell.arguments, *own]
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
    """The exit code of a job, which is ended if this process is interrupted."""
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
            start_new_session=queued,  # or Ctrl-C would end sbatch before it says the job's number
        ) as job,
    ):
        try:
            return job.wait()
        except BaseException:
            _end(job)
            raise


def _end(job: subprocess.Popen[str]) -> None:
    """Ends a job, and waits until it has ended: the next start must not meet it."""
    if job.stdout:  # of sbatch, which says "number" or "number;cluster" and waits for that job
        number, _, cluster = job.stdout.readline().strip().partition(";")
        of = [f"--clusters={cluster}"] if cluster else []
        if number:
            subprocess.run(["scancel", *of, number], check=False)
    else:
        job.terminate()  # mpirun ends its ranks
    try:
        job.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        job.kill()


def _others_seconds() -> float:
    """Seconds that the machine's cores have worked, but for the jobs that this process ended."""
    _, user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.children_user - own.children_system


def _missing(run: Path, options: Options) -> str:
    """What a run's metrics lack of its end; "" if nothing.

    An exit code of 0 is not enough: it is that of an srun that could not launch, too.
    """
    try:
        last = [{"step": 0, "epoch": 0.0}, *curves.read(run)][-1]
    except ValueError as error:
        return f"it ended with code 0, but {error}"
    steps, every = options.max_steps, options.log_every
    if last["epoch"] >= options.epochs or (steps and last["step"] >= steps - steps % every):
        return ""
    return f"it ended with code 0, but its metrics end at step {last['step']}"


def _why(output: Path, code: int) -> str:
    """What the program said last about its end; launchers add lines of their own."""
    if code == STOPPED:
        return "it was asked to stop before its end"
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line.startswith("mpikfac: ")] or list(filter(None, lines))
    return said[-1].removeprefix("mpikfac: ") if said else f"exit code {code}, without a word"
