"""Muon, SOAP, LARS and LAMB in the training program."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import torch

from mpikfac.checkpoint import latest_checkpoint, read_checkpoint
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import parse
from mpikfac_apps.problems import models
from mpikfac_apps.training import train
from mpikfac_apps.training.parts.optimizers import hidden_matrices, make_optimizer
from support.launch import run_each

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None,
    reason="pytorch_optimizer is not installed; run pip install pytorch_optimizer",
)
BOTH = ["muon", "soap"]
ALL = [*BOTH, "lars", "lamb"]
QUICK = ("--batch=120", "--data.train_images=360", "--log_every=1", "--threads=1")
TIMES = ("seconds", "images_per_second", "communication")
STEPS = "--epochs=5"  # 15 steps; SOAP refreshes its bases in step 12


def arguments(run_dir, *more):
    return [*QUICK, f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


@pytest.mark.parametrize("optimizer", ALL)
def test_a_missing_package_is_named(monkeypatch, optimizer):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = (
        f"optimizer={optimizer} needs the package pytorch_optimizer, which is not installed; "
        "run pip install pytorch_optimizer"
    )
    with pytest.raises(ValueError, match=message):
        parse([f"--optimizer={optimizer}"], 1)


@pytest.mark.gate
@needs_package
@pytest.mark.parametrize("optimizer", ALL)
def test_a_resumed_run_goes_on_exactly(tmp_path, optimizer):
    """Oracle: the uninterrupted run."""
    chosen, whole, parts = (f"--optimizer={optimizer}", STEPS), tmp_path / "whole", tmp_path / "x"
    assert train.main(arguments(whole, *chosen)) == 0
    for stop in (1, 4, 13):
        assert train.main(arguments(parts, *chosen, f"--max_steps={stop}", "--resume=auto")) == 0
    assert train.main(arguments(parts, *chosen, "--resume=auto")) == 0
    assert rows(parts) == rows(whole)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the directory of runs on 1 rank, on 2 ranks, and on 2, 1 and 4 ranks in turn."""
    root = tmp_path_factory.mktemp("ranks")
    runs = []
    for name in BOTH:
        chosen = (
            "--model=autoencoder_small",
            f"--optimizer={name}",
            STEPS,
            "--transport.virtual_ranks=4",
            "--resume=auto",
        )
        runs += [(n, arguments(root / f"{name} {n}", *chosen)) for n in (1, 2)]
        stops = (2, "--max_steps=4"), (1, "--max_steps=13"), (4, "--max_steps=null")
        runs += [(n, arguments(root / f"{name} moved", *chosen, stop)) for n, stop in stops]
    run_each(runs, root)
    return root


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("run", ["2", "moved"])
@pytest.mark.parametrize("optimizer", BOTH)
def test_ranks_change_no_bit_of_a_batch_in_parts(job, optimizer, run):
    """Oracle: the last checkpoint of one rank."""
    expected, found = (
        read_checkpoint(latest_checkpoint(job / f"{optimizer} {name}" / "checkpoints"))
        for name in ("1", run)
    )
    trained = [name for name in expected if name.startswith(("model/", "optimizer/state/"))]
    assert found["trainer/steps"] == 15
    assert len(trained) > 20
    for name in trained:
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])), name


def test_hidden_matrices_are_between_the_first_layer_and_the_last():
    """Oracle: all weights of more than one dimension but two; four layers of a block by name."""
    model = models.build("resnet20", classes=10, channels=3)
    hidden = set(hidden_matrices(model))
    layers = [p for p in model.parameters() if p.dim() > 1]
    assert [p in hidden for p in layers] == [False, *[True] * (len(layers) - 2), False]
    transformer = models.build("vit_small", classes=10, channels=3)
    hidden = set(hidden_matrices(transformer))
    names = {name for name, p in transformer.named_parameters() if p in hidden}
    assert "position" not in names
    assert {name.rpartition(".")[2] for name in names} == {"weight"}
    assert len(names) == 4 * len(transformer.blocks)


@pytest.mark.gate
@needs_package
def test_muon_steps_along_the_polar_factor_and_adamw_along_the_sign():
    """Oracle: the singular vectors of the gradients; five Newton-Schulz steps in bfloat16."""
    model = models.build("digits_cnn", classes=10, channels=1)
    optimizer = make_optimizer(Options(optimizer="muon", lr=0.01, weight_decay=0.0), model)
    hidden = hidden_matrices(model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for p, old, gradient in zip(model.parameters(), before, gradients):
        step = (old - p.detach()) / 0.01
        if any(p is matrix for matrix in hidden):
            left, _, right = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
            size = 0.2 * math.sqrt(max(gradient.flatten(1).shape))
            found = left.T @ step.flatten(1) @ right.T / size
            assert ((found.diag() > 0.6) & (found.diag() < 1.3)).all()
            assert (found - found.diag().diag()).abs().max() < 0.05
        else:
            torch.testing.assert_close(step, gradient.sign(), rtol=0, atol=1e-3)


@pytest.mark.gate
@needs_package
@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_steps_are_in_proportion_to_the_norm_of_a_layers_weights(optimizer):
    """Oracle: the first step by hand: [You et al. 2017, 2020], without bias correction."""
    lr, decay = 0.5, 0.1
    model = models.build("digits_cnn", classes=10, channels=1)
    made = make_optimizer(Options(optimizer=optimizer, lr=lr, weight_decay=decay), model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    gradients = [p.grad.clone() for p in model.parameters()]
    made.step()
    for p, old, gradient in zip(model.parameters(), before, gradients):
        if optimizer == "lars" and p.dim() > 1:
            share = 0.001 * old.norm() / (gradient.norm() + decay * old.norm())
            expected = old - lr * share * (gradient + decay * old)
        elif optimizer == "lars":
            expected = old - lr * gradient
        else:
            old = old * (1 - lr * decay)
            direction = 0.1 * gradient / (math.sqrt(0.001) * gradient.abs() + 1e-6)
            norm = old.norm().clamp(max=10)
            expected = old - lr * (norm / direction.norm() if norm else 1) * direction
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-6)
