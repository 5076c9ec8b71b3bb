"""Runs whose batch changes with the epoch: steps, schedules, metrics, restarts, ranks."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import mpikfac
from mpikfac_apps.options.options import Options
from mpikfac_apps.training import train

CLOCKS = ("seconds", "images_per_second", "communication")
GROWING = "--batch=60 until 1, 120 until 3, 180"
EPOCHS = [6, 9, 12, 14, 16]  # the last steps of 5 epochs of 360 images
QUICK = (GROWING, "--data.train_images=360", "--epochs=5", "--log_every=1", "--threads=1")
BY_EPOCH = (
    "--kfac.damping=0.1 until 1, 0.05 until 4, 0.01",
    "--kfac.inv_update_steps=2 until 3, 1",
)


def arguments(run_dir, *more):
    return [*QUICK, *BY_EPOCH, f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in CLOCKS} for row in lines]


def saved(run_dir):
    """Return the model's weights in the last checkpoint."""
    path = mpikfac.checkpoint.latest_checkpoint(run_dir / "checkpoints")
    checkpoint = mpikfac.checkpoint.read_checkpoint(path)
    return {name: checkpoint[name] for name in checkpoint if name.startswith("model/")}


def assert_same(found, expected):
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of an uninterrupted run."""
    root = tmp_path_factory.mktemp("whole")
    assert train.main(arguments(root)) == 0
    return root


def test_epochs_end_where_the_images_end(whole):
    """Oracle: by hand: 6 steps, twice 3 steps and twice 2 steps."""
    tests = {row["step"]: row["epoch"] for row in rows(whole) if "test_loss" in row}
    assert tests == dict(zip(EPOCHS, [1, 2, 3, 4, 5]))
    ages = {row["step"]: row["epoch"] for row in rows(whole)}
    expected = {1: 1 / 6, 3: 0.5, 7: 4 / 3, 13: 3.5}
    assert {step: ages[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert "steps 0 to 16, 6, then 3, then 2 per epoch" in (whole / "log.txt").read_text()


def test_the_rate_falls_by_epochs(whole):
    """Oracle: the line to 0 over 5 epochs, at the steps that begin an epoch."""
    rates, peak = {row["step"] - 1: row["lr"] for row in rows(whole)}, Options().rate
    firsts = [0, *EPOCHS[:-1]]
    found = [rates[step] for step in firsts]
    assert found == pytest.approx([peak * (1 - epoch / 5) for epoch in range(5)], rel=1e-5)


def test_speed_counts_images(tmp_path, monkeypatch):
    """Oracle: a clock with 1 s a step: as many images per second as images in a step."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("mpikfac_apps.running.metrics.time", clock)
    assert train.main(arguments(tmp_path)) == 0
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    speeds = {row["step"]: row["images_per_second"] for row in lines if "images_per_second" in row}
    assert [speeds[step] for step in (1, 6, 7, 12, 13, 16)] == [60, 60, 120, 120, 180, 180]


@pytest.mark.parametrize("stop", [6, 8, 13])
def test_a_resumed_run_goes_on_exactly(tmp_path, whole, stop):
    """Oracle: the uninterrupted run, stopped where the batch changes and inside of epochs."""
    assert train.main(arguments(tmp_path, f"--max_steps={stop}")) == 0
    assert train.main(arguments(tmp_path, "--resume=auto")) == 0
    assert rows(tmp_path) == rows(whole)
    assert_same(saved(tmp_path), saved(whole))


@pytest.mark.gate
def test_a_run_keeps_its_batches(tmp_path, capfd):
    """Oracle: the option in the message makes the run go on."""
    assert train.main(arguments(tmp_path, "--max_steps=2")) == 0
    with pytest.raises(SystemExit):
        train.main(arguments(tmp_path, "--resume=auto", "--batch=60"))
    remedy = "pass --batch='60 until 1, 120 until 3, 180'"
    assert remedy in capfd.readouterr().err
    given = remedy.removeprefix("pass ").replace("'", "")
    assert train.main(arguments(tmp_path, "--resume=auto", given, "--max_steps=3")) == 0


def runs(root):
    """Yield ranks and options of runs on several ranks."""
    for ranks in (1, 2, 3):
        yield ranks, arguments(root / f"plain {ranks}", "--model=plain")
    for ranks in (1, 2):
        yield ranks, arguments(root / f"in parts {ranks}", "--transport.virtual_ranks=4")
    moved = arguments(root / "moved", "--transport.virtual_ranks=4")
    yield 2, [*moved, "--max_steps=8"]
    yield 1, [*moved, "--resume=auto"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_train_as_one(job, ranks):
    """Oracle: one rank, to rounding."""
    one, several = (rows(job / f"plain {count}") for count in (1, ranks))
    for key in ("step", "epoch", "lr", "loss", "train_loss", "test_loss"):
        numbers = [[row[key] for row in lines if key in row] for lines in (one, several)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-4), key


@pytest.mark.slow
@pytest.mark.parametrize("other", ["in parts 2", "moved"])
def test_sums_in_order_make_the_same_weights_on_all_numbers_of_ranks(job, other):
    """Oracle: one rank, to the last bit."""
    assert_same(saved(job / other), saved(job / "in parts 1"))
