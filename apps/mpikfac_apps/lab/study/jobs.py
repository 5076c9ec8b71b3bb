"""Run the cells of a study one after another, and record how each cell ended.

STUDY/cells/CELL/run/          the run directory of the training program
STUDY/cells/CELL/output.txt    the output of the program
STUDY/cells/CELL/result.json   how the job ended; missing until then
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpikfac import files
from mpikfac_apps.guard.processes import processes_with, send
from mpikfac_apps.lab.study import curves
from mpikfac_apps.lab.study.spec import STOPPED, Cell
from mpikfac_apps.options.options import Options

TICK = 0.1  # seconds between two checks of processes that should end
LOOK = 1.0  # seconds between two checks of a running job
PATIENCE = 60.0  # seconds within which a job must end
CELLS = "MPIKFAC_CELLS"
"""The environment variable that holds the directory of the cells, in the processes of a job."""
KILLED = 128  # the exit code of a rank ended by a signal, minus the signal's number
# A note printed by an MPI launcher.
NOTE = re.compile(r"^(-{60,}|={60,})$.*?^\1$", re.MULTILINE | re.DOTALL)
FORM = {"code": int, "why": str, "seconds": float}  # the required fields of result.json


@dataclass(frozen=True)
class Result:
    """How a cell's last job ended.

    Attributes:
        code: the exit code; 0 if the run is complete.
        why: the reason for a failure, usually a line of the output; "" if the run is complete.
        seconds: the time from the start to the end of the job, including start-up and evaluations.
        cores: the number of cores available to the study's own process; None for a job that Slurm
            queued.
        others: the fraction of the machine's cores that other work used during the job; None for a
            job that Slurm queued.
    """

    code: int
    why: str
    seconds: float
    cores: int | None = None
    others: float | None = None


def result(directory: Path) -> Result | None:
    """Return the result of the cell in a directory; None if the cell has not ended.

    Raises:
        ValueError: result.json is damaged.
        OSError: result.json cannot be read.
    """
    try:
        content = files.read_form(directory / "result.json", FORM, files.SMALL)
    except FileNotFoundError:
        return None
    return Result(**{key: content[key] for key in Result.__annotations__ if key in content})


def run(
    cell: Cell, directory: Path, launcher: str, watch: Callable[[], None] = lambda: None
) -> Result:
    """Run a cell, and record the result; after an interruption, resume from the newest checkpoint.

    `watch` is called every second. Processes on this host that an earlier start of the study
    has left behind are ended first.

    An interruption of the study's process also ends the job; the cell then has no result.

    Raises:
        ValueError: no launcher is found.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "result.json").unlink(missing_ok=True)
    cells, output = directory.resolve().parent, directory / "output.txt"
    _end_left(cells)
    began, busy = time.monotonic(), _others_seconds()
    code = _job(command(cell, directory, launcher), output, watch, {CELLS: str(cells)})
    _end_left(cells)
    seconds = time.monotonic() - began
    why = _why(output, code) if code else _missing(directory / "run", cell.options)
    ended = Result(code or (1 if why else 0), why, round(seconds, 1))
    if launcher == "mpirun":
        others = (_others_seconds() - busy) / seconds / (os.cpu_count() or 1)
        cores = len(os.sched_getaffinity(0))
        ended = replace(ended, cores=cores, others=round(max(0.0, others), 3))
    draft = directory / "result.json.part"
    files.write_text(draft, json.dumps(asdict(ended)) + "\n")
    draft.replace(directory / "result.json")
    return ended


def command(cell: Cell, directory: Path, launcher: str) -> list[str]:
    """Return the command line of a cell's job.

    Raises:
        ValueError: no launcher is found.
    """
    program = [sys.executable, "-m", "mpi4py", "-m", "mpikfac_apps", "train", *cell.arguments]
    program += [f"--run_dir={directory / 'run'}", "--resume=auto", f"--exit_code={STOPPED}"]
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
    """Return the launcher ($MPIRUN, or the mpirun next to Python or on PATH) and its flags."""
    beside = Path(sys.executable).with_name("mpirun")
    usual = str(beside) if beside.exists() else shutil.which("mpirun")
    launcher = os.environ.get("MPIRUN") or usual
    if not launcher:
        raise ValueError("no mpirun is next to python or on PATH; load an MPI, or set MPIRUN")
    flags = os.environ.get("MPIRUN_FLAGS")
    if flags is None:  # a study can have more ranks than the machine has cores
        version = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, check=False
        ).stdout
        flags = "--oversubscribe" if "Open MPI" in version else ""
    return launcher, flags.split()


def _job(words: list[str], output: Path, watch: Callable[[], None], mark: Mapping[str, str]) -> int:
    """Return the exit code of a job; an interruption of the study ends the job.

    Args:
        mark: an environment variable by which the job's processes can be found.
    """
    defaults = {"OMP_NUM_THREADS": "1"}  # avoids one thread per core in every rank
    if os.geteuid() == 0:  # Open MPI requires two variables
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    queued, job = words[0] == "sbatch", None
    with files.writing(output) as file, ExitStack() as on_exit:
        try:
            with _interruptions_later():
                job = subprocess.Popen(
                    words,
                    env={**defaults, **os.environ, **mark},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if queued else file,
                    stderr=file,
                    text=True,
                    # Ctrl-C must not end sbatch before it prints the number that `_end` reads.
                    start_new_session=queued,
                )
            on_exit.enter_context(job)
            while (code := _ended(job)) is None:
                watch()
            return code
        except BaseException:
            if job:
                _end(job)
            raise


@contextmanager
def _interruptions_later() -> Iterator[None]:
    """Postpone a KeyboardInterrupt until the end of the block.

    An interruption within `Popen` would leave an unknown job behind.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _ended(job: subprocess.Popen[str]) -> int | None:
    """Return the exit code of a job that ends within `LOOK` seconds; None otherwise."""
    try:
        return job.wait(LOOK)
    except subprocess.TimeoutExpired:
        return None


def _end(job: subprocess.Popen[str]) -> None:
    """End a job and wait until it has ended, because the next job must not overlap with it."""
    if job.stdout:  # sbatch prints "number" or "number;cluster", then waits for the job
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


def _end_left(cells: Path) -> None:
    """End the processes left by jobs in `cells` whose launcher or study was killed.

    Raises:
        ValueError: a process does not end.
    """
    for _ in range(round(PATIENCE / TICK)):
        if not (left := list(processes_with(f"{CELLS}={cells}"))):
            return
        send(signal.SIGKILL, left)
        time.sleep(TICK)
    raise ValueError(f"processes {left} of an earlier job are still running; end them first")


def _others_seconds() -> float:
    """Return the machine's CPU seconds, excluding those of this process's finished jobs."""
    _, user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    times = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - times.children_user - times.children_system


def _missing(run: Path, options: Options) -> str:
    """Return an error message if a run with exit code 0 lacks final metrics; "" otherwise.

    An exit code of 0 does not prove that a run is complete: an srun that cannot launch the program
    also returns 0.
    """
    try:
        last = [{"step": 0, "epoch": 0.0}, *curves.read(run)][-1]
    except ValueError as error:
        return f"it ended with code 0, but {error}"
    steps, interval = options.max_steps, options.log_every
    if last["epoch"] >= options.epochs or (steps and last["step"] >= steps - steps % interval):
        return ""
    return f"it ended with code 0, but its metrics end at step {last['step']}"


def _why(output: Path, code: int) -> str:
    """Return the program's last message, without launchers' notes, or the signal that killed it."""
    if code == STOPPED:
        return "it received a request to stop before it was complete"
    with files.reading(output) as file:
        file.seek(max(0, output.stat().st_size - files.SMALL))
        text = file.read(files.SMALL).decode(errors="replace").replace("\0", "")
    lines = [line.strip() for line in NOTE.sub("", text).splitlines()]
    messages = [line for line in lines if line.startswith("mpikfac: ")]
    if not messages and (code < 0 or code > KILLED):
        number = code - KILLED if code > 0 else -code
        memory = ", perhaps for lack of memory" if number == signal.SIGKILL else ""
        return f"code {code}: ended by signal {number} ({signal.strsignal(number)}){memory}"
    messages = messages or list(filter(None, lines))
    if not messages:
        return f"exit code {code}, without a message"
    return messages[-1].removeprefix("mpikfac: ")
