"""Runs with a request to stop: the runs write a checkpoint, log the stop, and end as requested."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import mpikfac
from mpikfac_apps.training import train
from support.launch import TRAIN, kill, processes, start
from support.pace import paced

pytestmark = pytest.mark.slow

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
MOMENTS = 20 if SOAK else 1
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
OPTIONS = ("--batch=120", "--data.train_images=360", "--threads=1")

Targets = list[psutil.Process]
# The signal's targets. mpirun forwards USR1 and USR2 to all ranks.
TO: dict[str, Callable[[psutil.Process, Targets], Targets]] = {
    "one": lambda job, ranks: ranks[1:],
    "all": lambda job, ranks: ranks,
    "twice": lambda job, ranks: ranks * 2,
    "mpirun": lambda job, ranks: [job],
    "until the end": lambda job, ranks: ranks * 1000,
}
QUICK = [
    *(("SIGTERM", "one"), ("SIGUSR1", "mpirun"), ("SIGUSR2", "twice")),
    ("SIGTERM", "until the end"),
]
ALL = [(name, to) for name in SIGNALS for to in TO if (name, to) != ("SIGTERM", "mpirun")]


@pytest.fixture
def started(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Yield a run of two ranks that trains, and writes a checkpoint most of the time."""
    often = ("--epochs=9999", "--log_every=1", "--checkpoint_every=2", "--exit_code=75")
    with start(2, *TRAIN, *OPTIONS, *often, f"--run_dir={tmp_path}") as job:
        metrics = tmp_path / "metrics.jsonl"
        while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        yield job
        if job.poll() is None:
            kill(job)


def check_stopped(run: Path, log: str) -> None:
    """Check that the newest checkpoint is whole, and belongs to the step of the logged stop."""
    step = int(re.search(r"stopped after (\d+) steps", log)[1])
    found = mpikfac.find_checkpoint(mpikfac.world(), run / "checkpoints")
    assert found is not None and found.step == step
    assert not (run / "lock").exists()


@pytest.fixture(scope="module")
def seconds() -> Iterator[list[float]]:
    """Yield a list for seconds from a signal to a job's end; MPIKFAC_SOAK=1 prints the seconds."""
    took: list[float] = []
    yield took
    if SOAK:
        median = statistics.median(took)
        print(f"{len(took)} signals: median {median:.2f} s, worst {max(took):.2f} s to the end")


@pytest.mark.parametrize(("name", "to"), ALL if SOAK else QUICK)
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_signal_at_any_moment(started, tmp_path, seconds, name, to, moment):
    """Oracle: the chosen code, and the checkpoint of the step at which the run stopped."""
    job, ranks = psutil.Process(started.pid), processes(started)
    time.sleep(random.Random(f"{name} {to} {moment}").uniform(0, 1))
    sent = time.monotonic()
    for process in TO[to](job, ranks):
        if started.poll() is not None:
            break
        with suppress(psutil.NoSuchProcess):
            process.send_signal(getattr(signal, name))
        time.sleep(0.005)
    output, errors = started.communicate(timeout=paced(240))
    seconds.append(time.monotonic() - sent)
    assert started.returncode == 75, errors
    check_stopped(tmp_path, output)


@pytest.mark.gate
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_end_of_the_launcher_is_one_of_the_ranks(started, tmp_path, name):
    """Oracle: no rank is left; some whole checkpoint, as mpirun gives ranks hardly any time."""
    ranks = processes(started)
    while started.poll() is None and not list(tmp_path.glob("checkpoints/step-*")):
        time.sleep(0.01)
    started.send_signal(getattr(signal, name))
    started.communicate(timeout=paced(240))
    assert started.returncode != 0
    assert not psutil.wait_procs(ranks, timeout=paced(30))[1]
    assert mpikfac.find_checkpoint(mpikfac.world(), tmp_path / "checkpoints") is not None


@pytest.mark.gate
@pytest.mark.parametrize("who", ["control/stop", "--max_time=1", "SLURM_JOB_END_TIME"])
def test_control_files_and_the_clock_stop_a_run(tmp_path, monkeypatch, who):
    """Oracle: a request before the first step, or under 60 s left, stops the run after step 1."""
    options = [*OPTIONS, f"--run_dir={tmp_path}", "--resume=auto"]
    if who.startswith("--"):
        options.append(who)
    elif who.startswith("SLURM"):
        monkeypatch.setenv(who, f"{time.time() + 59:.0f}")
    else:
        (tmp_path / "control").mkdir()
        (tmp_path / who).touch()
    assert train.main(options) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "stopped after 1 steps" in log
    check_stopped(tmp_path, log)


@pytest.mark.gate
def test_a_control_file_asks_for_a_checkpoint(tmp_path):
    """Oracle: asked before the first step, the run writes a checkpoint of step 1, and continues."""
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "checkpoint").touch()
    options = ("--max_steps=3", "--resume=auto")
    assert train.main([*OPTIONS, *options, f"--run_dir={tmp_path}"]) == 0
    found = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert sorted(found) == ["step-000000001", "step-000000003"]
