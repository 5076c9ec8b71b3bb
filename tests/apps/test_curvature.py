"""Training runs with curvature servers, which decompose for the training ranks."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import torch

import mpikfac
from support.launch import PROGRAMS, TRAIN, kill, launch, processes, run_each, start
from support.pace import paced

FAULTY = str(PROGRAMS / "faulty.py")
OPTIONS = (
    *("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=1", "--threads=1"),
    *("--refresh.staleness=2", "--kfac.inv_update_steps=3"),
)
SERVED = (*OPTIONS, "--refresh=curvature-servers")
ONE, TWO = ((*SERVED, f"--refresh.servers={number}") for number in (1, 2))
OF_A_START = {"run/seconds", "run/metrics_bytes", "run/data"}
pytestmark = [pytest.mark.lab, pytest.mark.slow]


def saved(run_dir, step):
    """Return the checkpoint of a run, without measured seconds and options."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {name: found[name] for name in found.keys() - OF_A_START}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, name


@pytest.mark.gate
def test_a_run_with_curvature_servers_is_that_of_the_ranks_that_train(tmp_path):
    """Oracle: two ranks without curvature servers, also after a stop and with another number."""
    without, parts = tmp_path / "without", tmp_path / "parts"
    run_each(
        [
            (2, [*OPTIONS, f"--run_dir={without}"]),
            (4, [*TWO, f"--run_dir={parts}", "--max_steps=4"]),
            (3, [*ONE, f"--run_dir={parts}", "--resume=auto"]),
        ],
        tmp_path,
    )
    assert "kfac/due" in saved(parts, 4)  # decompositions of step 3 are on their way
    assert_equal(saved(parts, 9), saved(without, 9))


LIMIT = round(paced(3))  # seconds of a step
# Kind, place and rank of a fault, in a job of two training ranks and a curvature server; the job's
# code and message.
ENDS = {
    "a curvature server fails": (
        *("raise", "curvature", 2, 1),
        ("mpikfac: rank 2 of 3, ", "curvature: RuntimeError: on purpose"),
    ),
    "a curvature server dies": ("kill", "curvature", 2, 137, ()),
    "a curvature server hangs": (
        *("sleep", "curvature", 2, 1),
        (f"mpikfac: no progress for {LIMIT} s: ", 'waiting in "receive bases" of step 5'),
    ),
    "a training rank fails": (
        *("raise", "forward", 1, 1),
        ("mpikfac: rank 1 of 2, ", "step 1: RuntimeError: on purpose"),
    ),
    "a training rank leaves": (
        *("exit", "end", 0, 1),
        ("mpikfac: rank 0 of 2, ", "SystemExit: 0"),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_fault_on_either_side_ends_the_job(tmp_path, case):
    """Oracle: by hand: code, rank and cause; no process is left."""
    kind, place, rank, code, told = ENDS[case]
    run_dir = tmp_path / "run"
    fault = (FAULTY, kind, place, str(rank), str(tmp_path / "time"))
    job = launch(3, *fault, *ONE, f"--watchdog_timeout={LIMIT}", f"--run_dir={run_dir}")
    assert job.returncode == code, job.stderr
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpikfac: ")]
    assert bool(told) == any(all(text in line for text in told) for line in lines), lines
    assert not left_of(run_dir)


def test_a_mistake_is_told_once_and_ends_all_ranks(tmp_path):
    """Oracle: code and line of a run without curvature servers."""
    (tmp_path / "file").touch()
    job = launch(3, *TRAIN, *ONE, f"--run_dir={tmp_path}")
    assert job.returncode == 2, job.stderr
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("mpikfac: ")]
    assert "is not empty; use another one" in line
    assert not left_of(tmp_path)


def test_a_signal_to_all_stops_the_run(tmp_path):
    """Oracle: the chosen code and the checkpoint of a step, possibly with pending bases."""
    options = (*ONE, "--epochs=9999", "--exit_code=75", f"--run_dir={tmp_path}")
    with start(3, *TRAIN, *options) as job:
        metrics = tmp_path / "metrics.jsonl"
        while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        processes(job)[2].send_signal(signal.SIGTERM)  # to the curvature server alone: nothing
        time.sleep(0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGUSR1)
        try:
            output, errors = job.communicate(timeout=paced(110))
        finally:
            if job.poll() is None:
                kill(job)
    assert job.returncode == 75, errors
    assert "stopped after" in output
    assert mpikfac.find_checkpoint(mpikfac.world(), tmp_path / "checkpoints") is not None


def left_of(run_dir):
    """Return the remaining processes of a run; a process that waits for the launcher may leave."""
    alive = psutil.process_iter(["cmdline"])
    found = [p for p in alive if f"--run_dir={run_dir}" in (p.info["cmdline"] or [])]
    return psutil.wait_procs(found, timeout=paced(20))[1]
