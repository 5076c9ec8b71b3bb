"""Fine-tuning: epochs in which only the last module is trained; ranks and restarts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac_apps.options.parse import parse
from mpikfac_apps.problems import models
from mpikfac_apps.training import settings
from mpikfac_apps.training.parts.optimizers import Frozen

STEPS = 9  # 3 steps are an epoch
LAST = "10."  # the linear layer of digits_cnn
QUICK = (
    *(
        "--data.train_images=72",
        "--batch=24",
        "--transport.virtual_ranks=4",
        "--epochs=3",
        "--frozen_epochs=1",
    ),
    *("--threads=1", "--log_every=1", "--schedule=constant"),
)
KINDS = {
    "kfac": ("--kfac.inv_update_steps=2", "--strategy=mem-opt"),
    "sgd": ("--optimizer=sgd",),
    "adamw": ("--optimizer=adamw", "--ema_decay=0.9"),
}


def runs(root):
    for name, more in KINDS.items():
        yield 1, [*QUICK, *more, f"--run_dir={root / f'{name} whole'}"]
        yield 2, [*QUICK, *more, f"--run_dir={root / f'{name} ranks'}"]
        for step in (2, 3, 4):  # in the first epoch, at its end, and after the first step of all
            run_dir = f"--run_dir={root / f'{name} {step}'}"
            yield 1, [*QUICK, *more, run_dir, f"--max_steps={step}"]
            yield 2, [*QUICK, *more, run_dir, "--resume=auto"]


def state(run_dir, step=STEPS):
    """Return the model of a checkpoint by names of tensors."""
    saved = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{step:09d}")
    return {n.removeprefix("model/"): saved[n] for n in saved if n.startswith("model/")}


def first_weights():
    torch.manual_seed(0)
    return dict(models.build("digits_cnn", classes=10, channels=1).named_parameters())


def test_all_layers_but_the_last_are_frozen_in_the_first_epochs():
    """Oracle: by hand; a parameter that the network freezes stays frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3))
    model[0].bias.requires_grad_(False)
    frozen = Frozen(model, 2)
    for epoch in range(4):
        frozen.begin_epoch(epoch)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        others = ["0.weight", "1.weight", "1.bias"] if epoch >= 2 else []
        assert trained == [*others, "2.weight", "2.bias"]
    assert frozen.last == "2"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_frozen_layers_stay_for_an_epoch_and_a_step(job, name):
    """Oracle: the first weights of the seed."""
    start, end = first_weights(), state(job / f"{name} whole")
    for step in (2, 3, 4):
        found = state(job / f"{name} {step}", step)
        for key, value in start.items():
            assert torch.equal(found[key], value) == (not key.startswith(LAST)), (step, key)
    assert not any(torch.equal(end[key], value) for key, value in start.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranks", "2", "3", "4"])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_and_restarts_change_no_bit(job, name, kind):
    """Oracle: an uninterrupted run on one rank; restarts are on two ranks."""
    expected, found = state(job / f"{name} whole"), state(job / f"{name} {kind}")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
def test_a_restart_keeps_the_number_of_epochs(job):
    """Oracle: the line."""
    path = job / "sgd whole" / "checkpoints" / f"step-{STEPS:09d}"
    saved = settings.saved_run(mpikfac.checkpoint.read_checkpoint(path))
    options = parse([*QUICK, "--optimizer=sgd"], 1)
    assert settings.follow(options, saved, 1) == options
    with pytest.raises(ValueError, match=r"saved with frozen_epochs=1; this run has 2; pass --fr"):
        settings.follow(parse([*QUICK, "--frozen_epochs=2"], 1), saved, 1)
