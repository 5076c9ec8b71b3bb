"""Start a program on several ranks of this machine: `mpikfac launch`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from mpikfac_apps import cli
from mpikfac_apps.launching import mpi
from mpikfac_apps.launching.job import MpiJob, Order
from mpikfac_apps.launching.programs import PROGRAMS, RANK_VARIABLES, answer

MEMORY = Path("/dev/shm")
TIMEOUT = "--watchdog_timeout"
TIMEOUT_VARIABLE = "MPIKFAC_WATCHDOG_TIMEOUT"
"""The environment variable that limits the seconds between two steps of a script."""
USAGE = """usage: mpikfac launch -n N [--watchdog_timeout SECONDS] PROGRAM [ARGUMENT ...]

Start a program on N ranks of this machine, under the MPI that mpi4py loads.

  mpikfac launch -n 4 train --data.name digits
  mpikfac launch -n 4 my_script.py --lr 0.01

PROGRAM is a Python file, or one of mpikfac's programs: train, evaluate, influence, laplace,
equations, check, calibrate, or an example.

With --watchdog_timeout, a script's ranks write their stacks and exit if no rank begins or completes
a step for SECONDS. Choose more than the longest step, evaluation or checkpoint takes. Under mpirun,
set MPIKFAC_WATCHDOG_TIMEOUT=SECONDS instead. mpikfac's programs have their own option.

Ctrl-C or SIGTERM asks the training to stop after a step, with a checkpoint; the same command with
--resume auto continues. Your own script receives SIGTERM on every rank, which ends it unless it
handles the signal. The next Ctrl-C ends all ranks immediately. The exit code is the program's.

MPIRUN names the launcher of another MPI, and MPIRUN_FLAGS replaces the launcher's options.
Inside a Slurm or PBS job, `mpikfac launch` prints the command to use instead."""


class RankProgram(NamedTuple):
    """A program to start: the number of ranks, its name, and its arguments.

    Attributes:
        timeout: the time limit of a script's watchdog, in seconds; "" for no watchdog.
    """

    ranks: int
    name: str
    arguments: list[str]
    timeout: str = ""

    @property
    def words(self) -> list[str]:
        """The command that each rank runs, as a user writes it."""
        start = ["mpikfac"] if self.name in PROGRAMS else ["python", "-m", "mpi4py"]
        return [*start, self.name, *self.arguments]

    @property
    def command(self) -> list[str]:
        """The command that each rank runs; with -m mpi4py, an error on any rank ends all ranks."""
        package = ["-m", "mpikfac_apps"] if self.name in PROGRAMS else []
        return [sys.executable, "-m", "mpi4py", *package, self.name, *self.arguments]


def main(argv: Sequence[str]) -> int:
    """Start a program on several ranks, wait until it ends, and return its exit code.

    The exit code is 2 if the program rejects an option, or if it cannot be started; a one-line
    message then gives the reason.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    return cli.run("mpikfac launch", lambda: launch(read(argv)))


def read(argv: Sequence[str]) -> RankProgram:
    """Return the program that a command line names.

    Raises:
        ValueError: the number of ranks or the program is missing or wrong.
    """
    if argv[0] != "-n" or len(argv) < 3:
        raise ValueError(f"pass -n N PROGRAM, such as -n 4 train, not {shlex.join(argv)}")
    _, count, *rest = argv
    timeout = ""
    if rest[0] == TIMEOUT:
        if len(rest) < 3:
            raise ValueError(f"pass {TIMEOUT} SECONDS and a script, not {shlex.join(argv)}")
        _, timeout, *rest = rest
        _check_timeout(timeout, rest[0])
    name, *arguments = rest
    if not re.fullmatch("0*[1-9][0-9]{0,4}", count):
        raise ValueError(f"-n {count} must be the number of ranks, a whole number from 1 to 99999")
    if name not in PROGRAMS and not Path(name).is_file():
        nearest = get_close_matches(name, [n for n, p in PROGRAMS.items() if p.ranks], n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; see mpikfac --help"
        raise ValueError(f"{name} is neither a file nor a program of mpikfac{hint}")
    if name in PROGRAMS and not PROGRAMS[name].ranks:
        raise ValueError(f"{name} does not run on several ranks; use mpikfac {name}")
    return RankProgram(int(count), name, arguments, timeout)


def _check_timeout(timeout: str, name: str) -> None:
    """Check the time limit of a watchdog, for the program `name`.

    Raises:
        ValueError: the limit is not a number of seconds, or the program is one of mpikfac's
            programs, which have their own option.
    """
    if name in PROGRAMS:
        raise ValueError(
            f"{TIMEOUT} {timeout} before {name} is only for scripts; put it after {name}"
        )
    if not re.fullmatch(r"[0-9]{1,8}(\.[0-9]*)?", timeout) or not float(timeout):
        raise ValueError(f"{TIMEOUT} {timeout} must be a number of seconds > 0")


def launch(program: RankProgram) -> int:
    """Run a program under MPI; return the exit code.

    Raises:
        ValueError: ranks cannot be started from here, or no MPI can start them.
        OSError: the MPI launcher cannot be executed.
    """
    if program.name in PROGRAMS:
        code = answer(program.name, program.arguments)
        if code is not None:
            return code
    environ = dict(os.environ)
    check_place(program, environ)
    chosen = mpi.loaded_mpi(environ)
    command = mpi.command(chosen, program.ranks, program.command, environ)
    parent = MEMORY if os.access(MEMORY, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=f"mpikfac-{os.getpid()}.", dir=parent))
    remove_left(directory.parent)
    try:
        variables = mpi.variables(chosen, program.ranks, directory, environ)
        variables |= {TIMEOUT_VARIABLE: program.timeout} if program.timeout else {}
        saves = program.name.startswith("train")
        return MpiJob(Order(command, program.command, variables, directory, saves)).wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_left(parent: Path) -> None:
    """Remove the empty directories that launchers of this user left in `parent` when killed."""
    for place in parent.glob("mpikfac-*.*"):
        process = place.name.removeprefix("mpikfac-").partition(".")[0]
        if not Path("/proc", process).exists():
            with suppress(OSError):  # owned by another user, or not empty
                place.rmdir()


def check_place(program: RankProgram, environ: Mapping[str, str]) -> None:
    """Check that ranks can be started here: not inside a scheduler's job or an MPI job.

    Raises:
        ValueError: ranks cannot be started here; the one-line message names the command to use.
    """
    ranks, words = program.ranks, shlex.join(program.words)
    if "SLURM_JOB_ID" in environ:
        plugin = mpi.PLUGINS[mpi.loaded_mpi(environ).maker]
        raise ValueError(
            f"in a Slurm job, srun starts the ranks; use srun --mpi={plugin} -n {ranks} {words}"
        )
    if "PBS_JOBID" in environ:
        raise ValueError(f"in a PBS job, mpirun finds the hosts; use mpirun -n {ranks} {words}")
    if started := [name for name in RANK_VARIABLES if name in environ]:
        raise ValueError(
            f"{started[0]} is set, so this process is a rank and cannot start ranks; leave out "
            f"mpirun, srun or torchrun"
        )
