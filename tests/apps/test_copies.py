"""Runs whose ranks step copies of the model and exchange weights every few steps."""

from __future__ import annotations

import json
import math

import pytest
import torch

import mpikfac
from support.launch import run_each

# an epoch has three steps
QUICK = (
    *("--data.train_images=360", "--batch=120", "--epochs=2", "--threads=1", "--log_every=1"),
    *("--model=plain", "--optimizer=sgd"),
)
EXCHANGED = "--sync=local-sgd"
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]


def saved(run_dir, step=6):
    """Return the items of a checkpoint, without times."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {name: found[name] for name in found.keys() - {"run/seconds", "run/metrics_bytes"}}


def weights(run_dir, step=6):
    return {name: value for name, value in saved(run_dir, step).items() if "model/" in name}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory of finished runs on two ranks."""
    root = tmp_path_factory.mktemp("copies")
    asked = {
        "gradients": (),
        "every fourth": (EXCHANGED, "--sync.sync_every=4", "--checkpoint_every=2"),
        "at the end of an epoch": (EXCHANGED, "--sync.sync_every=50", "--trace_steps=3"),
        "post-local": (EXCHANGED, "--sync.sync_every=4", "--sync.warmup_steps=6"),
        "compressed": ("--compression.gradients=int8", "--transport.overlap=true"),
        "leader": ("--strategy=lsgd", "--sync.sync_every=2", "--checkpoint_every=2"),
        "local K-FAC": (EXCHANGED, "--sync.sync_every=3", "--optimizer=kfac", "--lr=0.001"),
    }
    run_each([(2, [*QUICK, f"--run_dir={root / n}", *more]) for n, more in asked.items()], root)
    return root


def test_post_local_sgd_begins_as_averaged_gradients(runs):
    """Oracle: the run that averages gradients; the exchange of weights begins after the end."""
    found, expected = weights(runs / "post-local"), weights(runs / "gradients")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "name", ["every fourth", "at the end of an epoch", "leader", "local K-FAC"]
)
def test_copies_end_as_one_model_that_learned(runs, name):
    """Oracle: the checkpoint holds one model, other than that of averaged gradients; the loss."""
    found, expected = weights(runs / name), weights(runs / "gradients")
    assert found.keys() == expected.keys()
    assert not all(torch.equal(found[item], expected[item]) for item in expected)
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    losses = [row["test_loss"] for row in rows if "test_loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < math.log(10) * 1.05


def test_a_checkpoint_waits_for_the_next_exchange(runs):
    """Oracle: exchanges after steps 3, 4 and 6, by hand; checkpoints are asked for at 2, 4, 6."""
    names = {path.name for path in (runs / "every fourth" / "checkpoints").glob("step-*")}
    assert {"step-000000004", "step-000000006"} <= names
    assert "step-000000002" not in names


def test_bytes_are_those_of_exchanges_alone(runs):
    """Oracle: the traced steps hold the end of an epoch, which is the only exchange."""
    found = json.loads((runs / "at the end of an epoch" / "stages.json").read_text())
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        assert "reduce gradients" not in rank["stages"]
        assert rank["stages"]["exchange weights"]["bytes"] > 0


def test_a_baseline_takes_every_transport(runs):
    """Oracle: int8 rounds: other weights, and near those of exact sums."""
    found, expected = weights(runs / "compressed"), weights(runs / "gradients")
    tensors = [name for name in expected if torch.is_tensor(expected[name])]
    assert not all(torch.equal(found[name], expected[name]) for name in tensors)
    for name in tensors:
        scale = expected[name].abs().max()
        assert (found[name] - expected[name]).abs().max() < 0.05 * scale


def test_copies_go_on_with_other_ranks(runs, tmp_path):
    """Oracle: the runs end after all steps of three epochs, with one model each."""
    before = runs / "every fourth" / "checkpoints" / "step-000000006"
    given = (*QUICK, EXCHANGED, "--sync.sync_every=4", "--epochs=3", f"--resume={before}")
    run_each([(n, [*given, f"--run_dir={tmp_path / str(n)}"]) for n in (1, 3)], tmp_path)
    found, more = weights(tmp_path / "1", 9), weights(tmp_path / "3", 9)
    assert found.keys() == more.keys() == weights(before.parents[1]).keys()
