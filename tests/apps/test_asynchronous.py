"""Training runs of clients and servers."""

from __future__ import annotations

import json
import math
import signal
import time

import pytest
import torch

import mpikfac
from mpikfac_apps.options.parse import parse
from support.launch import TRAIN, kill, launch, run_each, start
from support.pace import paced

pytestmark = pytest.mark.lab

# an epoch has three steps
QUICK = (
    *("--data.train_images=360", "--batch=120", "--epochs=3", "--threads=1", "--log_every=1"),
    *("--model=plain", "--optimizer=sgd"),
)
UPDATES = "--strategy=downpour"
PROGRAM = ("--model=digits_cnn", *(option for option in QUICK if "model" not in option))


def saved(run_dir, step=9):
    """Return model and optimizer of a checkpoint."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {n: found[n] for n in found.keys() if n.startswith(("model/", "optimizer/"))}  # noqa: SIM118


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory of finished runs."""
    root = tmp_path_factory.mktemp("asynchronous")
    asked = [
        (1, "one rank", ()),
        (2, "one client", (UPDATES, "--max_steps=4")),
        (2, "one client", (UPDATES, "--resume=auto", "--max_steps=6")),
        (1, "one client", ("--strategy=comm-opt", "--resume=auto")),
        (4, "three clients", (UPDATES, "--checkpoint_every=4")),
        (
            4,
            "two servers",
            (UPDATES, "--sync.servers=2", "--sync.push_interval=2", "--sync.warmup_updates=2"),
        ),
        (3, "two ranks", (UPDATES, "--sync.ranks_per_client=2")),
        (2, "averaged", ()),
    ]
    run_each([(n, [*QUICK, *more, f"--run_dir={root / name}"]) for n, name, more in asked], root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "right"), [("one client", "one rank"), ("two ranks", "averaged")]
)
def test_one_client_is_synchronous_training(runs, found, right):
    """Oracle: synchronous SGD, bit for bit; a run goes on after a restart, also without server."""
    one, other = saved(runs / found), saved(runs / right)
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value) if torch.is_tensor(value) else one[name] == value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three clients", "two servers"])
def test_clients_learn_and_tell_the_staleness(runs, name):
    """Oracle: less loss than equal probabilities; lines of metrics and the log hold the staleness.

    The order of arrival differs from run to run, so the loss need not fall in each epoch.
    """
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    losses = [row["test_loss"] for row in rows if "test_loss" in row]
    assert losses[-1] < 0.9 * math.log(10)
    assert all(row["staleness"] >= 0 for row in rows if "loss" in row)
    (line,) = [x for x in (runs / name / "log.txt").read_text().splitlines() if "staleness" in x]
    assert f"client {2 if name == 'three clients' else 1}: mean" in line


@pytest.mark.slow
def test_checkpoints_are_written_when_they_are_due(runs):
    """Oracle: the option."""
    names = {path.name for path in (runs / "three clients" / "checkpoints").glob("step-*")}
    assert "step-000000008" in names


@pytest.mark.slow
def test_a_signal_stops_all_clients_after_the_same_step(tmp_path):
    """Oracle: the chosen code, and a checkpoint."""
    options = (*PROGRAM, UPDATES, "--epochs=9999", "--exit_code=75", f"--run_dir={tmp_path}")
    with start(4, *TRAIN, *options) as job:
        metrics = tmp_path / "metrics.jsonl"
        while job.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        try:
            output, errors = job.communicate(timeout=paced(110))
        finally:
            if job.poll() is None:
                kill(job)
    assert job.returncode == 75, errors
    assert "stopped after" in output
    assert mpikfac.find_checkpoint(mpikfac.world(), tmp_path / "checkpoints") is not None


@pytest.mark.slow
def test_a_mistake_of_clients_ends_all_ranks(tmp_path):
    """Oracle: code and message; the server does not wait for ever."""
    more = ("--sync.push_interval=2", "--optimizer=adamw", f"--run_dir={tmp_path}")
    job = launch(3, *TRAIN, *PROGRAM, UPDATES, *more)
    assert job.returncode == 2, job.stderr
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("mpikfac: ")]
    assert "push_interval=2 needs the optimizer SGD, not AdamW" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sync.servers=3",), "sync.servers=3 must be less than the number of ranks (3)"),
        (("--optimizer=kfac",), "sync=parameter-server needs an optimizer other than kfac"),
        (("--ema_decay=0.9",), "ema_decay=0.9 needs sync=synchronous, not parameter-server"),
        (("--shrink=true",), "shrink=true needs sync=synchronous, not parameter-server"),
        (
            ("--sync.ranks_per_client=3",),
            "sync.ranks_per_client=3 must divide the number of ranks (2)",
        ),
        (
            ("--transport.virtual_ranks=2",),
            "sync='parameter-server' needs transport.virtual_ranks=None",
        ),
        (
            ("--strategy=comm-opt", "--sync.servers=2"),
            "sync.servers belongs to sync=parameter-server, not to sync=synchronous",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    """Oracle: the message."""
    with pytest.raises(ValueError, match=".*") as refused:
        parse([*PROGRAM, UPDATES, *options], 3)
    assert said in str(refused.value)
