"""The training program as a process: Ctrl-C, closed and narrow streams, threads at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mpikfac
from support.launch import TRAIN, launch
from support.pace import paced

OPTIONS = ("--batch=120", "--data.train_images=360", "--threads=1")
Alone = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def alone(tmp_path):
    """Return a function that starts the training program as a single process without mpirun."""
    jobs = []

    def start(*more: str, **how: object) -> subprocess.Popen[str]:
        command = [sys.executable, *TRAIN, *OPTIONS, f"--run_dir={tmp_path / 'run'}", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, **(pipes | how)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.communicate()


def wait_for(file: Path, job: subprocess.Popen[str]) -> None:
    while job.poll() is None and not (file.exists() and file.stat().st_size):
        time.sleep(0.01)


@pytest.mark.gate
def test_ctrl_c_writes_a_checkpoint_and_stops(alone, tmp_path):
    """Oracle: the chosen code, the checkpoint of the step in the log, and a next start."""
    job = alone("--epochs=9999", "--log_every=1", "--exit_code=75")
    wait_for(tmp_path / "run" / "metrics.jsonl", job)
    job.send_signal(signal.SIGINT)
    output, errors = job.communicate(timeout=paced(240))
    assert job.returncode == 75, errors
    assert errors.startswith("mpikfac: Ctrl-C: stopping after this step, with a checkpoint; ")
    found = mpikfac.find_checkpoint(mpikfac.world(), tmp_path / "run" / "checkpoints")
    *_, last = output.splitlines()
    remedy = "to continue, start the run again with --resume auto"
    assert last.startswith(f"stopped after {found.step} steps (Ctrl-C); {remedy}")
    assert last.endswith("; exit code 75 is intended, whatever the launcher prints below")
    again = alone("--epochs=9999", "--resume=auto", f"--max_steps={found.step + 1}")
    assert "complete after" in again.communicate(timeout=paced(240))[0]


WAITS = """
import sys, time
from pathlib import Path
from mpikfac_apps.guard.requests import Requests
requests = Requests(Path(sys.argv[1]), end=None, every_minutes=None)
print("polls", flush=True)
while not requests.stop:
    time.sleep(0.001)
requests.ignore_signals()
print(requests.reason, flush=True)
{}
"""


@pytest.mark.parametrize("busy", ["time.sleep(600)", "import re; re.match('(a+)+b', 'a' * 99)"])
def test_the_second_ctrl_c_ends_a_process_at_once(tmp_path, busy):
    """Oracle: the system's code of SIGINT, also while C holds the interpreter."""
    command = [sys.executable, "-c", WAITS.format(busy), str(tmp_path)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as run:
        for line in ("polls\n", "Ctrl-C\n"):
            assert run.stdout.readline() == line
            run.send_signal(signal.SIGINT)
        assert run.wait(timeout=paced(60)) == -signal.SIGINT
        assert len(run.stderr.readlines()) == 1


def test_ctrl_c_that_the_shell_ignores_stays_ignored(tmp_path):
    """Oracle: a process started with SIGINT ignored, as shells start background jobs."""
    command = [sys.executable, "-c", WAITS.format(""), str(tmp_path)]
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    run = subprocess.Popen(command, stdout=-1, text=True)
    signal.signal(signal.SIGINT, former)
    assert run.stdout.readline() == "polls\n"
    for _ in range(3):
        run.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=paced(60))[0] == "SIGUSR1\n"
    assert run.returncode == 0


@pytest.mark.gate
def test_ctrl_c_at_the_start_is_one_line(tmp_path):
    """Oracle: a program that is interrupted before it has read its options."""
    program = """
    import sys
    from mpikfac_apps import __main__
    from mpikfac_apps.guard import ranks
    def interrupted(*_):
        raise KeyboardInterrupt
    ranks.read_options = interrupted
    sys.exit(__main__.main(["train"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=paced(240))
    assert (ran.returncode, ran.stderr) == (130, "mpikfac train: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_closed_stream_does_not_end_a_run(alone, tmp_path, closed):
    """Oracle: the end of the log, and the files of the run without text that belongs elsewhere."""
    job = alone("--epochs=1", preexec_fn=lambda: [os.close(number) for number in closed])
    output, errors = job.communicate(timeout=paced(240))
    assert job.returncode == 0, output + errors
    run = tmp_path / "run"
    assert "complete after 3 steps" in (run / "log.txt").read_text()
    assert all(line.startswith("{") for line in (run / "metrics.jsonl").read_text().splitlines())
    assert mpikfac.find_checkpoint(mpikfac.world(), run / "checkpoints").step == 3


@pytest.mark.slow
def test_a_stream_that_cannot_encode_a_name_does_not_end_a_run(alone, tmp_path):
    """Oracle: Python's codes of the characters, on both streams."""
    names = {"PYTHONIOENCODING": "ascii"}
    run = tmp_path / "größe 東"
    job = alone("--epochs=1", f"--run_dir={run}", env=os.environ | names)
    output, errors = job.communicate(timeout=paced(240))
    assert job.returncode == 0, errors
    assert rf"wrote {tmp_path}/gr\xf6\xdfe \u6771/checkpoints/step-000000003" in output
    assert str(run) in (run / "log.txt").read_text()
    job = alone("--epochs=1", f"--run_dir={run}", env=os.environ | names)
    assert r"gr\xf6\xdfe \u6771: it is not empty" in job.communicate(timeout=paced(240))[1]


KEEPS = """
import sys, threading, time
from mpikfac_apps.training import train
train.PATIENCE = 0.5
def wait():
    threading.main_thread().join()
    time.sleep(3)
threading.Thread(target=wait, name="a thread of the user's").start()
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thread_that_keeps_the_job_is_named(tmp_path, ranks):
    """Oracle: the thread's name, and every rank with the thread."""
    program = tmp_path / "program.py"
    program.write_text(KEEPS)
    job = launch(ranks, str(program), *OPTIONS, "--epochs=1", f"--run_dir={tmp_path / 'run'}")
    assert job.returncode == 0, job.stderr
    told = sorted(line for line in job.stderr.splitlines() if line.startswith("mpikfac: "))
    assert told == [
        f"mpikfac: the run is over, but rank {rank} is waiting for the thread "
        f'"a thread of the user\'s"; end the job, and start such threads as daemons'
        for rank in range(ranks)
    ]
