"""`mpikfac launch`: the command of ranks, MPI's notes, exit codes, and requests to stop."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import mpikfac
from mpikfac_apps.guard.requests import LAUNCHER
from mpikfac_apps.launching import launch, mpi
from mpikfac_apps.launching.launch import RankProgram
from mpikfac_apps.launching.mpi import INTEL, MPICH, OPEN, Mpi
from mpikfac_apps.launching.notes import Output
from mpikfac_apps.launching.programs import RANK_VARIABLES
from support.pace import paced

TRAINING = ("--batch=120", "--data.train_images=360", "--epochs=9999", "--log_every=1")
STOPPED = 75
AS_ROOT = dict.fromkeys(mpi.AS_ROOT, "1")


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    """Remove the variables of a job in which the tests may run."""
    for name in (*RANK_VARIABLES, "SLURM_JOB_ID", "PBS_JOBID", "MPIRUN_FLAGS"):
        monkeypatch.delenv(name, raising=False)


# -- what is started -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train", "pass -n N PROGRAM, such as -n 4 train, not train"),
        ("-n 4", "pass -n N PROGRAM, such as -n 4 train, not -n 4"),
        ("-np 4 train", "pass -n N PROGRAM"),
        ("-n 0 train", "-n 0 must be the number of ranks, a whole number from 1 to 99999"),
        (
            f"-n {'9' * 20} train",
            f"-n {'9' * 20} must be the number of ranks, a whole number from 1 to 99999",
        ),
        ("-n four train", "-n four must be the number of ranks, a whole number"),
        ("-n 2 trane", "trane is neither a file nor a program of mpikfac; did you mean train?"),
        ("-n 2 no_file.py", "no_file.py is neither a file nor a program of mpikfac"),
        ("-n 2 compare runs/a", "compare does not run on several ranks; use mpikfac compare"),
        (
            "-n 2 --watchdog_timeout 60 train",
            "--watchdog_timeout 60 before train is only for scripts; put it after train",
        ),
        ("-n 2 --watchdog_timeout never train.py", "--watchdog_timeout never must be a number"),
        ("-n 2 --watchdog_timeout 60", "pass --watchdog_timeout SECONDS and a script"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, arguments, words):
    """Oracle: the message by hand, and code 2."""
    assert launch.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mpikfac launch: {words}")


def test_a_program_refuses_its_options_before_ranks_start(capsys, monkeypatch):
    """Oracle: no MPI is looked for."""
    monkeypatch.setattr(mpi, "loaded_mpi", lambda environ: pytest.fail("ranks would start"))
    assert launch.main(["-n", "2", "train", "--lerning_rate=1"]) == 2
    assert capsys.readouterr().err.startswith("mpikfac: options: unknown key lerning_rate; did")
    assert launch.main(["-n", "2", "train", "--help"]) == 0


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (
            "SLURM_JOB_ID",
            "in a Slurm job, srun starts the ranks; use srun --mpi=pmi2 -n 3 mpikfac train --lr=1",
        ),
        (
            "PBS_JOBID",
            "in a PBS job, mpirun finds the hosts; use mpirun -n 3 mpikfac train --lr=1",
        ),
        (
            "PMIX_RANK",
            "PMIX_RANK is set, so this process is a rank and cannot start ranks; leave out mpirun",
        ),
    ],
)
def test_a_job_of_a_scheduler_starts_ranks_itself(capsys, monkeypatch, variable, words):
    """Oracle: the message by hand, and code 2."""
    chosen = Mpi(MPICH, Path("/opt/mpich/lib/libmpi.so.12"), "/opt/mpich/bin/mpiexec")
    monkeypatch.setattr(mpi, "loaded_mpi", lambda environ: chosen)
    monkeypatch.setenv(variable, "1")
    assert launch.main(["-n", "3", "train", "--lr=1"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("maker", "ranks", "environ", "flags"),
    [
        (OPEN, 2, {}, ["--bind-to", "none"]),
        (OPEN, 3, {}, ["--oversubscribe"]),
        (OPEN, 3, {"MPIRUN_FLAGS": "--host a:2,b:2"}, ["--host", "a:2,b:2"]),
        (MPICH, 3, {}, []),
        (INTEL, 3, {}, []),
    ],
)
def test_ranks_get_the_options_that_their_mpi_needs(monkeypatch, maker, ranks, environ, flags):
    """Oracle: the options by hand, on a machine of 2 cores."""
    monkeypatch.setattr(mpi, "cores", lambda: 2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    starter = Mpi(maker, Path("/opt/lib/libmpi.so"), "/opt/bin/start")
    command = mpi.command(starter, ranks, ["python", "x.py"], environ)
    assert command == ["/opt/bin/start", *flags, "-n", str(ranks), "python", "x.py"]


def test_root_is_told_what_open_mpi_needs(monkeypatch):
    """Oracle: Open MPI's two variables; the launcher sets none of them, and MPICH asks for none."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    place = Path("/opt/lib/libmpi.so"), "/opt/bin/start"
    with pytest.raises(ValueError, match="export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROO"):
        mpi.command(Mpi(OPEN, *place), 1, ["x"], {"OMPI_ALLOW_RUN_AS_ROOT": "1"})
    assert mpi.command(Mpi(OPEN, *place), 1, ["x"], AS_ROOT)
    assert mpi.command(Mpi(MPICH, *place), 1, ["x"], {})
    assert not AS_ROOT.keys() & mpi.variables(Mpi(OPEN, *place), 1, Path("/tmp"), {}).keys()


def test_the_launcher_of_the_loaded_library_is_taken(tmp_path, monkeypatch):
    """Oracle: a made-up installation; another mpirun is on the path."""
    for prefix, name in (("a", "mpirun"), ("b", "mpirun"), ("b", "mpiexec.hydra")):
        (tmp_path / prefix / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / prefix / "bin" / name).touch(mode=0o755)
    path, of_a, of_b = str(tmp_path / "b" / "bin"), tmp_path / "a", tmp_path / "b"
    library = of_a / "lib" / "openmpi" / "libmpi.so.40"
    assert mpi.starter_of(OPEN, library, path) == str(of_a / "bin" / "mpirun")
    assert mpi.starter_of(INTEL, of_b / "lib" / "libmpi.so", "") == f"{path}/mpiexec.hydra"
    assert mpi.starter_of(MPICH, tmp_path / "c" / "libmpi.so", path) == f"{path}/mpiexec.hydra"
    monkeypatch.setattr(mpi.sys, "prefix", str(of_a))
    assert Mpi(OPEN, library, "").of_environment and not Mpi(OPEN, of_b / "x", "").of_environment


def test_the_environment_of_a_job_keeps_what_the_user_chose(tmp_path, monkeypatch):
    """Oracle: the variables by hand; a site's own MPI keeps the site's networks."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    site = Mpi(OPEN, Path("/opt/lib/libmpi.so"), "/opt/bin/mpirun")
    wheel = Mpi(OPEN, Path(sys.prefix).resolve() / "lib" / "libmpi.so", "mpirun")
    assert mpi.variables(site, 3, tmp_path, {"HOME": "/h"}) == {
        "HOME": "/h",
        "OMP_NUM_THREADS": "2",
    }
    of_wheel = mpi.variables(wheel, 16, tmp_path, {"OMPI_MCA_pml": "ucx"})
    assert of_wheel["OMPI_MCA_pml"] == "ucx" and of_wheel["OMPI_MCA_btl"] == "self,sm,tcp"
    assert of_wheel["OMPI_MCA_btl_sm_backing_directory"] == str(tmp_path)
    assert of_wheel["OMP_NUM_THREADS"] == "1"
    hosts = mpi.variables(site, 3, tmp_path, {"MPIRUN_FLAGS": "--host a,b"})
    assert "OMP_NUM_THREADS" not in hosts
    chosen = mpi.variables(site, 3, tmp_path, {"MPIRUN": "/opt/bin/mpirun"})
    assert chosen["MPI4PY_LIBMPI"] == f"/opt/lib:/opt/lib64::{sys.prefix}/lib"


# -- the notes of MPI ------------------------------------------------------------------------------

DASHES, SIGNS = "-" * 74 + "\n", "=" * 83 + "\n"
NOTES = {
    "Open MPI 5, code": f"""{DASHES}prterun detected that one or more processes exited with \
non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-13757@1,0]
   Exit code:    2
{DASHES}""",
    "Open MPI 5, abort": f"""{DASHES}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[17130,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
{DASHES}{DASHES}prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{DASHES}\0""",
    "MPICH, abort": "Abort(1) on node 1 (rank 1 in comm 0): "
    "application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n",
}
KILLED = {
    "Open MPI 5": f"""{DASHES}prterun noticed that process rank 1 with PID 13769 on node vm \
exited on
signal 9 (Killed).
{DASHES}""",
    "Intel MPI": f"""
{SIGNS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 1 PID 21 RUNNING AT vm
=   KILLED BY SIGNAL: 9 (Killed)
{SIGNS}""",
    "MPICH": f"""
{SIGNS}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 21 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{SIGNS}YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
""",
}
OTHERS = {
    "a table of the program": f"{DASHES}a b\n{DASHES}1 2\n{DASHES}",
    "a bar": "\r 10 %\r 20 %\n",
    "other notes": f"{DASHES}There are not enough slots available in the system.\n{DASHES}",
    "signs": "====\n----\n=\n-\n\n",
    "no end of line": "a\nb-",
    "a rule alone": f"above\n{DASHES}below\n",
    "longer rules": f"-{DASHES}a\n-{DASHES}",
    "a line that ends in a rule": f"title {DASHES}a\n",
}


def passed(pieces: Sequence[str]) -> tuple[str, Output]:
    """Return what passes of a stream that comes in pieces."""
    get, put = os.pipe()
    with os.fdopen(get, "rb") as reader:
        output = Output(put)
        for piece in pieces:
            output.feed(piece.encode())
        output.release(at_end=True)
        os.close(put)
        return reader.read().decode(), output


def cut(text: str, seed: int) -> list[str]:
    """Return a text in pieces of random lengths."""
    ends = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)])]


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("other", OTHERS)
def test_notes_of_mpi_do_not_pass_and_everything_else_does(note, other):
    """Oracle: the text without the note, whatever the pieces of the stream."""
    above = OTHERS[other] if OTHERS[other].endswith("\n") else f"{OTHERS[other]}\n"
    for seed in range(20):
        text, output = passed(cut(above + NOTES[note] + OTHERS[other], seed))
        assert text == above + OTHERS[other]
        assert not output.killed and not output.spoken


@pytest.mark.parametrize("maker", KILLED)
def test_a_note_about_a_signal_is_understood(maker):
    """Oracle: signal 9, by hand."""
    for seed in range(20):
        text, output = passed(cut(f"a\n{KILLED[maker]}b\n", seed))
        assert text == "a\nb\n" and b"9" in output.killed.groups()


def test_a_note_behind_an_unfinished_line_begins_a_line():
    """Oracle: by hand; a rank's bar of progress has no end of line."""
    text, _ = passed(["\r 10 %", NOTES["Open MPI 5, code"] + "b"])
    assert text == "\r 10 %\nb"


@pytest.mark.parametrize(
    ("pieces", "spoken"),
    [(["mpikfac: x\n"], True), (["mpi", "kfac: x\n"], True), (["a mpikfac: x\n"], False)],
)
def test_a_message_of_the_program_is_noted(pieces, spoken):
    """Oracle: by hand; a message begins a line."""
    assert passed(pieces)[1].spoken is spoken


def test_what_is_no_note_passes_soon(monkeypatch):
    """Oracle: a clock, and the text by hand; whole lines pass at once."""
    clock = [0.0]
    monkeypatch.setattr("mpikfac_apps.launching.notes.time.monotonic", lambda: clock[0])
    get, put = os.pipe()
    output = Output(put)
    for content, at_once, later in (
        ("a\nPassword: ", "a\n", "Password: "),
        (f"\nc\n{DASHES}b\n", "\nc\n", f"{DASHES}b\n"),
    ):
        output.feed(content.encode())
        output.release()
        assert os.read(get, 99).decode() == at_once
        clock[0] += 1.0
        output.release()
        assert os.read(get, 99).decode() == later
    os.close(get)
    output.feed(b"nobody reads\n")
    os.close(put)


@pytest.mark.parametrize(
    ("process", "content", "stays"),
    [("dead", "", False), ("dead", "stop", True), ("living", "", True), ("other", "", True)],
)
def test_empty_directories_of_killed_launchers_are_removed(tmp_path, process, content, stays):
    """Oracle: a process that has ended, this process, and a name of another program."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        "dead": f"mpikfac-{dead.pid}.a",
        "living": f"mpikfac-{os.getpid()}.a",
        "other": "x-1.a",
    }
    place = tmp_path / names[process]
    place.mkdir()
    if content:
        (place / content).touch()
    launch.remove_left(tmp_path)
    assert place.exists() == stays


# -- jobs ------------------------------------------------------------------------------------------


def started(ranks: int, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `mpikfac launch`, with Ctrl-C as on a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "mpikfac_apps", "launch", "-n", str(ranks), *words],
        env={"OMP_NUM_THREADS": "1", **AS_ROOT, **os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(job: subprocess.Popen[str], mark: Path) -> tuple[int, str, str]:
    """Return code, output and errors of a job; no process and no directory of the job is left.

    Args:
        mark: a path in the command line of the ranks.
    """
    output, errors = job.communicate(timeout=paced(240))
    left = [p for p in psutil.process_iter(["cmdline"]) if str(mark) in str(p.info["cmdline"])]
    assert not psutil.wait_procs(left, timeout=paced(5))[1]
    assert not list(Path("/dev/shm").glob(f"mpikfac-{job.pid}.*"))
    return job.returncode, output, errors


SCRIPTS = {
    "codes": ("import sys; sys.exit(3)", 3, "mpikfac launch: the program ended with code 3\n"),
    "succeeds": ("print('done')", 0, ""),
    "raises": (
        "if MPI.COMM_WORLD.rank == 1: raise ValueError('x')\nMPI.COMM_WORLD.barrier()",
        1,
        "ValueError: x\nmpikfac launch: the program ended with code 1\n",
    ),
    "killed": (
        "import os\nif MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), 9)\nMPI.COMM_WORLD.barrier()",
        137,
        "was ended by signal 9 (Killed)\n",
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_code_of_a_script_comes_with_at_most_one_line(tmp_path, name):
    """Oracle: codes and messages by hand; MPI's notes are missing."""
    content, code, message = SCRIPTS[name]
    script = tmp_path / f"{name}.py"
    script.write_text(f"from mpi4py import MPI\n{content}\n")
    result, output, errors = ended(started(2, str(script)), script)
    assert result == code and errors.endswith(message), errors
    assert "MPI_ABORT" not in errors and "-----" not in errors
    assert output.count("done") == 2 * (name == "succeeds")


@pytest.mark.gate
def test_a_mistake_of_the_user_is_one_line(tmp_path):
    """Oracle: the only line of the program, and code 2."""
    job = started(2, "train", "--batch=121", f"--run_dir={tmp_path / 'run'}")
    code, output, errors = ended(job, tmp_path)
    assert (code, output) == (2, "")
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(
        "mpikfac: options: batch=121 must be a multiple of the number of ranks"
    )


WAITS = """
import signal, sys, time
from mpi4py import MPI
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 0:
    print("waits", flush=True)
time.sleep(600)
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("numbers", "does", "code"),
    [
        ([signal.SIGINT], "obeys", 130),
        ([signal.SIGTERM], "obeys", 143),
        ([signal.SIGINT], "handles", 7),
        ([signal.SIGINT, signal.SIGINT], "ignores", 130),
    ],
)
def test_a_script_gets_sigterm_and_ends(tmp_path, numbers, does, code):
    """Oracle: codes of the shell for signals, and the code of a handler."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    job = started(2, str(script), does)
    assert job.stdout.readline() == "waits\n"
    for number in numbers:
        job.send_signal(number)
        time.sleep(0.5)
    result, _, errors = ended(job, script)
    assert result == code, errors
    assert len(errors.splitlines()) == 1, errors


@pytest.mark.gate
def test_a_killed_launcher_leaves_no_rank(tmp_path):
    """Oracle: the processes of the machine."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    job = started(2, str(script))
    assert job.stdout.readline() == "waits\n"
    family = psutil.Process(job.pid).children(recursive=True)
    directory = Path(family[0].environ()[LAUNCHER])
    job.kill()
    job.communicate()
    assert len(family) >= 3 and not psutil.wait_procs(family, timeout=paced(30))[1]
    directory.rmdir()


def has_ranks_to_come(process: int) -> bool:
    """Return whether `mpikfac launch` has started the launcher of MPI."""
    with suppress(psutil.NoSuchProcess):
        return any(LAUNCHER in p.environ() for p in psutil.Process(process).children())
    return False


def check_stopped(ranks: int, number: signal.Signals, seconds: float, run: Path) -> None:
    """Check that a training leaves a checkpoint that is asked to stop after some seconds.

    Oracle: the chosen code, and the checkpoint of the step in the log; no process is left.

    Args:
        seconds: from the start of the launcher of MPI.
    """
    job = started(ranks, "train", *TRAINING, f"--exit_code={STOPPED}", f"--run_dir={run}")
    while job.poll() is None and not has_ranks_to_come(job.pid):
        time.sleep(0.01)
    time.sleep(seconds)
    job.send_signal(number)
    code, output, errors = ended(job, run)
    assert code == STOPPED, output + errors
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    # Rank 0 may hear of the request by the votes of a rank that has looked before.
    stopped = re.search(
        rf"stopped after (\d+) steps \(({name}|another rank received a request)\)", output
    )
    assert stopped, output
    step = int(stopped[1])
    checkpoint = mpikfac.find_checkpoint(mpikfac.world(), run / "checkpoints")
    assert checkpoint is not None and checkpoint.step == step
    assert errors.startswith(f"mpikfac launch: {name}: the run stops after a step, with a check")
    assert len(errors.splitlines()) == 1, errors
    assert not (run / "lock").exists()


@pytest.mark.gate
def test_ctrl_c_under_the_launcher_leaves_a_checkpoint(tmp_path):
    """Oracle: see `check_stopped`."""
    check_stopped(2, signal.SIGINT, paced(4.0), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_request_at_any_moment_leaves_a_checkpoint(tmp_path, ranks, name, moment):
    """Oracle: see `check_stopped`; the first moments are those of the start of the ranks."""
    seconds = random.Random(f"{ranks} {name} {moment}").uniform(0, 12.0)
    check_stopped(ranks, getattr(signal, name), paced(seconds), tmp_path / "run")


def test_a_rank_runs_the_program_under_mpi4py():
    """Oracle: the command by hand; a rank that raises then ends all ranks."""
    start = [sys.executable, "-m", "mpi4py"]
    assert RankProgram(2, "train", ["--lr=1"]).command == [
        *start,
        "-m",
        "mpikfac_apps",
        "train",
        "--lr=1",
    ]
    assert RankProgram(2, "a.py", ["x"]).command == [*start, "a.py", "x"]
