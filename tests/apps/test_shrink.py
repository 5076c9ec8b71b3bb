"""Remaining ranks train on after a kill, under an MPI that survives kills."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess

import pytest

from mpikfac_apps.training.train import main
from support.launch import PROGRAMS, launch, launcher

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
KILLS = 20
pytestmark = pytest.mark.slow
QUICK = (
    *("--model=plain", "--data.train_images=378", "--epochs=3", "--log_every=1", "--threads=1"),
    *("--batch=60", "--kfac.inv_update_steps=2", "--shrink=true", "--ema_decay=0.8"),
)
STEPS = 18
UNEVEN = "--batch=63"  # of 3 ranks, but not of 2
OWNERS = (
    "--strategy=mem-opt",
    "--assignment.factor_reduction=reduce_scatter",
    "--checkpoint_every=4",
)
OWNER_UPDATES = ("--assignment.shard_optimizer=true", "--checkpoint_every=4")


def open_mpi_5():
    version = subprocess.run([launcher()[0], "--version"], capture_output=True, text=True).stdout
    return re.search(r"\(Open MPI\) 5\.", version) is not None


survivable = pytest.mark.skipif(not open_mpi_5(), reason="needs Open MPI 5's mpirun --with-ft ulfm")


def train(run_dir, monkeypatch, rank, step, *more, seconds=0.0):
    """Return the end of a job of 3 ranks, of which a single rank is killed."""
    monkeypatch.setenv("MPIRUN_FLAGS", f"{' '.join(launcher()[1])} --with-ft ulfm")
    program = str(PROGRAMS / "killed.py")
    options = [*QUICK, f"--run_dir={run_dir}", *more]
    return launch(3, program, str(rank), str(step), str(seconds), *options)


def losses(run_dir, key="loss"):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in lines if key in row}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return losses of training and of tests of a run of one rank."""
    run = tmp_path_factory.mktemp("whole")
    program = str(PROGRAMS / "plain.py")
    job = launch(1, program, *QUICK, "--shrink=false", f"--run_dir={run}")
    assert job.returncode == 0, job.stderr
    return losses(run), losses(run, "test_loss")


@survivable
@pytest.mark.parametrize("rank", [0, 2] if SOAK else [0])
def test_ranks_that_hold_everything_go_on_where_they_are(tmp_path, monkeypatch, expected, rank):
    """Oracle: the losses of a run without kills, to rounding; the step of the kill."""
    job = train(tmp_path, monkeypatch, rank, 9)
    assert job.returncode == 0, job.stderr
    assert "step 9: lost 1 of 3 ranks" in job.stdout + job.stderr
    assert f"continuing from {tmp_path}/checkpoints/step-000000009" in job.stdout
    assert "ranks 2, batch 60, steps 9 to 18" in job.stdout
    found = losses(tmp_path), losses(tmp_path, "test_loss")  # tests take averages of weights
    assert found == tuple(pytest.approx(numbers, rel=1e-4) for numbers in expected)


@survivable
@pytest.mark.parametrize(
    ("rank", "more"),
    [(2, OWNERS), (0, OWNER_UPDATES), (2, OWNER_UPDATES)] if SOAK else [(2, OWNERS)],
)
def test_what_a_lost_rank_alone_held_is_taken_from_the_last_checkpoint(
    tmp_path, monkeypatch, rank, more
):
    """Oracle: the step of the checkpoint; every step is taken, with the losses of one process.

    Ranks 0 and 2 own the two layers.
    """
    whole_dir = tmp_path.with_name("whole")
    options = (*QUICK, UNEVEN, "--shrink=false", f"--run_dir={whole_dir}")
    job = launch(1, str(PROGRAMS / "plain.py"), *options)
    assert job.returncode == 0, job.stderr
    job = train(tmp_path, monkeypatch, rank, 9, UNEVEN, *more)
    assert job.returncode == 0, job.stderr
    output = job.stdout + job.stderr
    assert "could be verified on the remaining ranks: continuing from the last checkpoint" in output
    assert re.search(rf"continuing from {tmp_path}/checkpoints/step-00000000[48]\n", job.stdout)
    found, whole = losses(tmp_path), losses(whole_dir)
    assert found == pytest.approx(whole, rel=0.01)  # 2 ranks take a batch of 62


@pytest.mark.gate
def test_an_mpi_that_does_not_survive_is_refused_in_one_line(tmp_path, capfd, monkeypatch):
    """Oracle: the remedy, and no run directory."""
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as leave:
        main(["--batch=60", f"--run_dir={run}", "--shrink=true"])
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mpikfac: options: if a rank dies, ")
    assert line.endswith("start the job with mpirun --with-ft ulfm")
    assert not run.exists()


@survivable
@pytest.mark.skipif(not SOAK, reason="20 jobs; MPIKFAC_SOAK=1 runs them")
@pytest.mark.parametrize("number", range(KILLS))
def test_no_rank_is_left_waiting_wherever_another_dies(tmp_path, monkeypatch, number):
    """Oracle: the job's end; `--resume auto` completes an incomplete job."""
    chance = random.Random(number)
    more = chance.choice([(), OWNERS, OWNER_UPDATES])
    where = chance.randrange(3), chance.randrange(2, STEPS - 5)
    job = train(tmp_path, monkeypatch, *where, *more, seconds=chance.uniform(1e-4, 0.03))
    complete = "complete after" in job.stdout
    assert "lost 1 of 3 ranks" in job.stdout + job.stderr or not complete
    print(f"{where} {more}: {'went on' if complete else 'ended'}, code {job.returncode}")
    assert complete == (job.returncode == 0), job.stderr
    if not complete:
        again = train(tmp_path, monkeypatch, 0, -1, *more, "--resume=auto")
        assert again.returncode == 0, again.stderr
