"""The run that small programs share: rows, ranks, restarts, stops, and refused options."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import mpikfac
from mpikfac_apps.programs import run
from mpikfac_apps.programs.options import ProgramOptions
from mpikfac_apps.programs.trainer import trainer_of
from programs.line import LineOptions, drawn
from support.launch import PROGRAMS, launch

pytestmark = pytest.mark.lab

PROGRAM = str(PROGRAMS / "line.py")
SHORT = ("--optimizer=sgd", "--lr=0.05", "--warmup=1", "--epochs=3", "--device=cpu")


def fitted(steps, seed=0, count=4):
    """Return weight, mean losses and mean errors of an epoch, by numpy."""
    (weight, bias), momentum, means = np.array([0.5, 0.0]), np.zeros(2), []
    for step in range(steps):
        x = drawn(seed, step, count)
        error = weight * x + bias - (2 * x - 1)
        gradient = np.array([(2 * error * x).mean(), (2 * error).mean()])
        gradient += 0.0001 * np.array([weight, bias])
        momentum = 0.9 * momentum + gradient
        rate = 0.05 * min((step + 1) / 2, 1 - step / 6)
        weight, bias = np.array([weight, bias]) - rate * momentum
        means.append(((error**2).mean(), abs(error).mean(), weight))
    return means


def rows_of(folder):
    """Return the rows of a run that have a test."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "test_weight" in row]


def check(folder):
    """Compare the rows of a whole run with numpy."""
    means = fitted(6)
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row, first, second in zip(rows, means[::2], means[1::2], strict=True):
        assert row["train_loss"] == pytest.approx((first[0] + second[0]) / 2, rel=1e-4)
        assert row["train_error"] == pytest.approx((first[1] + second[1]) / 2, rel=1e-4)
        assert row["test_weight"] == pytest.approx(second[2], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_of_the_examples_of_all_ranks(tmp_path, ranks):
    """Oracle: numpy, on all points at once."""
    ended = launch(ranks, PROGRAM, *SHORT, f"--run_dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    check(tmp_path / "run")
    assert "a line with sgd; ranks" in ended.stdout and "complete after 6 steps" in ended.stdout


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4)])
def test_a_run_goes_on_within_an_epoch_on_other_ranks(tmp_path, before, after):
    """Oracle: numpy, without a restart; the third step is the first of an epoch."""
    arguments = (*SHORT, f"--run_dir={tmp_path / 'run'}")
    assert launch(before, PROGRAM, *arguments, "--max_steps=3").returncode == 0
    ended = launch(after, PROGRAM, *arguments, "--resume=auto")
    assert ended.returncode == 0, ended.stderr
    check(tmp_path / "run")


def test_a_run_goes_on_with_its_options_only(tmp_path):
    """Oracle: the line, from one rank, and the code."""
    arguments = (*SHORT, f"--run_dir={tmp_path / 'run'}")
    assert launch(1, PROGRAM, *arguments, "--max_steps=3").returncode == 0
    ended = launch(2, PROGRAM, *arguments, "--resume=auto", "--points=8")
    assert ended.returncode == 2
    assert ended.stderr.count("the checkpoint belongs to a run with points=4, not 8") == 1
    ended = launch(1, PROGRAM, *arguments)
    assert ended.returncode == 2 and "it is not empty" in ended.stderr


def test_an_unknown_tracker_is_refused_before_the_start(tmp_path):
    """Oracle: the line, and no run directory."""
    ended = launch(1, PROGRAM, *SHORT, "--metrics=foo", f"--run_dir={tmp_path / 'run'}")
    assert ended.returncode == 2 and not (tmp_path / "run").exists()
    assert "metrics=foo must be one of tensorboard" in ended.stderr


def test_a_changed_option_is_named():
    """Oracle: the text; options of a start may change."""
    before, now = run.of_numbers(LineOptions()), run.of_numbers(LineOptions(seed=1))
    with pytest.raises(ValueError, match="belongs to a run with seed=0, not 1"):
        run.check_options(before, now)
    run.check_options(before, run.of_numbers(LineOptions(run_dir="elsewhere", max_steps=3)))


def test_the_rate_rises_and_falls():
    """Oracle: by hand; 4 steps, one of warm-up."""
    options = ProgramOptions(optimizer="sgd", lr=0.8, warmup=1)
    rates = [options.rate_of(step, 4) for step in range(4)]
    assert rates == pytest.approx([0.4, 0.6, 0.4, 0.2])
    assert ProgramOptions(optimizer="sgd").rate == 0.1


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("sgd", "SGD"), ("kfac", "SGD")])
def test_a_program_has_the_optimizer_of_its_options(name, kind):
    """Oracle: the class, and the numbers of the options."""
    model = torch.nn.Linear(3, 2)
    options = ProgramOptions(optimizer=name, lr=0.3, momentum=0.5, weight_decay=0.01)
    trainer = trainer_of(mpikfac.world(), model, options)
    group = trainer.optimizer.param_groups[0]
    assert type(trainer.optimizer).__name__ == kind
    assert isinstance(trainer, mpikfac.KFAC) == (name == "kfac")
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.01)
    assert group["betas"][0] == 0.5 if name == "adamw" else group["momentum"] == 0.5
    trainer.close()
