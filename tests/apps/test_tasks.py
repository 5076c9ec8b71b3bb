"""Autoencoders in the training program: loss and measure, ranks, restart, comparisons."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac_apps.inspecting import export
from mpikfac_apps.lab.study import compare
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.problems.tasks import RECONSTRUCTION
from mpikfac_apps.training import batches, train
from support.launch import run_each

TIMES = ("seconds", "images_per_second", "communication")
SMALL = ("--model=autoencoder_small", "--batch=120", "--data.train_images=360", "--epochs=3")
CHOSEN = {
    "sgd": ("--optimizer=sgd", "--lr=10"),
    "adamw": ("--optimizer=adamw", "--lr=0.003"),
    "kfac": ("--kfac.fisher_type=type-2", "--kfac.damping=0.003"),
    "quadratic": (
        *(
            "--kfac.fisher_type=type-2",
            "--kfac.grafting=quadratic-model",
            "--schedule=constant",
            "--momentum=0",
        ),
        *("--weight_decay=0", "--kfac.damping=0.02", "--kfac.damping_adapt=2"),
    ),
}


def arguments(run_dir, *more):
    return [*SMALL, "--log_every=2", "--threads=1", f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


def test_an_autoencoder_mirrors_its_encoder_and_its_code_is_linear():
    """Oracle: the widths of the literature, 784-400-200-100-50-25-6."""
    model = models.build("autoencoder", classes=0, channels=1)
    widths = [layer.out_features for layer in model if isinstance(layer, nn.Linear)]
    assert widths == [400, 200, 100, 50, 25, 6, 25, 50, 100, 200, 400, 784]
    code = next(n for n, layer in enumerate(model) if getattr(layer, "out_features", 0) == 6)
    assert isinstance(model[code + 1], nn.Linear)
    assert sum(isinstance(layer, nn.Tanh) for layer in model) == 10
    assert model(torch.rand(3, 1, 28, 28)).shape == (3, 784)


def test_loss_and_error_are_those_of_the_literature():
    """Oracle: the Bernoulli likelihood and the squared distance, pixel by pixel."""
    draw = torch.Generator().manual_seed(0)
    logits, pixels = torch.randn(5, 7, generator=draw), torch.rand(5, 7, generator=draw)
    p = logits.sigmoid()
    likelihood = pixels * p.log() + (1 - pixels) * (1 - p).log()
    torch.testing.assert_close(RECONSTRUCTION.loss(logits, pixels), -likelihood.mean())
    distances = torch.linalg.vector_norm(p - pixels, dim=1) ** 2
    torch.testing.assert_close(RECONSTRUCTION.measured(logits, pixels), distances.sum())


def test_pixels_of_digits_lie_between_0_and_1():
    """Oracle: the bytes: white is 16."""
    found = datasets.load("digits")
    inputs = batches.unit(found.train_images, found.white)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert torch.equal(16 * inputs, found.train_images.float())


def test_metrics_are_those_of_the_final_weights(tmp_path):
    """Oracle: loss and error of all test images at once, by the weights of the checkpoint."""
    assert train.main(arguments(tmp_path, *CHOSEN["adamw"])) == 0
    found = datasets.load("digits")
    model = models.build("autoencoder_small", classes=10, channels=1)
    assert export.main([str(tmp_path), "--weights", str(tmp_path / "weights.pt")]) == 0
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with torch.no_grad():
        inputs = found.test_images.float() / 16
        logits = model(inputs)
    (last,) = rows(tmp_path)[-1:]
    loss = F.binary_cross_entropy_with_logits(logits, inputs.flatten(1))
    error = (logits.sigmoid() - inputs.flatten(1)).square().sum(1).mean()
    assert last["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert last["test_error"] == pytest.approx(error.item(), rel=1e-5)
    assert "test_accuracy" not in last


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the directory of the same runs on 1 to 4 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    run_each(
        [
            (ranks, arguments(root / f"{name} {ranks}", *chosen))
            for name, chosen in CHOSEN.items()
            for ranks in (1, 2, 3, 4)
        ],
        root,
        timeout=550,
    )
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the directory of runs of SGD and K-FAC on this rank."""
    root = tmp_path_factory.mktemp("alone")
    for name in ("sgd", "kfac"):
        assert train.main(arguments(root / name, *CHOSEN[name])) == 0
    return root


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CHOSEN)
def test_all_numbers_of_ranks_learn_the_same(job, name, ranks):
    """Oracle: one rank."""
    one, several = (rows(job / f"{name} {count}") for count in (1, ranks))
    assert [sorted(row) for row in several] == [sorted(row) for row in one]
    for key in ("loss", "train_loss", "test_loss", "train_error", "test_error"):
        numbers = [[row[key] for row in lines if key in row] for lines in (one, several)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-4), key
    assert numbers[0][-1] < numbers[0][0]


@pytest.mark.gate
@pytest.mark.parametrize("name", CHOSEN)
def test_a_resumed_run_goes_on_exactly(tmp_path, name):
    """Oracle: the uninterrupted run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(arguments(whole, *CHOSEN[name])) == 0
    assert train.main(arguments(parts, *CHOSEN[name], "--max_steps=4")) == 0
    assert train.main(arguments(parts, *CHOSEN[name], "--resume=auto")) == 0
    assert rows(parts) == rows(whole)


@pytest.mark.gate
def test_compare_knows_that_a_small_error_is_good(alone, capsys, tmp_path):
    """Oracle: the lines of the metrics."""
    names = ["sgd", "kfac"]
    errors = {n: [r["test_error"] for r in rows(alone / n) if "test_error" in r] for n in names}
    target = min(errors["kfac"]) + 1e-6
    assert min(errors["sgd"]) > target
    runs = [str(alone / name) for name in names]
    picture = tmp_path / "curves.svg"
    assert compare.main([*runs, "--target", str(target), "--png", str(picture)]) == 0
    _, first, _, _, *seen = capsys.readouterr().out.splitlines()
    assert first.split()[-2:] == ["never", "never"] and f"{min(errors['sgd']):.4g}" in first
    assert seen[0].startswith(f"A test error of {target:.4g} was reached by kfac after 3 epochs")
    assert "test error" in picture.read_text()


def test_runs_with_different_measures_are_not_compared(alone, capsys, tmp_path):
    row = {"step": 1, "epoch": 1.0, "seconds": 1.0, "test_accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert compare.main([str(alone / "sgd"), str(tmp_path)]) == 2
    assert "classifiers are measured by accuracy, autoencoders by error" in capsys.readouterr().err
