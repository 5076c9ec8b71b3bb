"""The network of airbench94: whitening, first weights, ranks and restarts; its recipe's loss."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from mpikfac.checkpoint import latest_checkpoint, read_checkpoint
from mpikfac_apps.lab.study import spec
from mpikfac_apps.problems import airbench, datasets, models
from mpikfac_apps.training import batches, train

pytestmark = pytest.mark.lab

WIDTHS = (8, 16, 16)
SIX = ("--max_steps=6",)  # the end of the third epoch
CHOSEN = {
    "sgd": ("--optimizer=sgd", "--nesterov=true", "--lr=0.05", "--schedule=cosine"),
    "kfac": ("--kfac.factor_update_steps=1", "--kfac.inv_update_steps=2"),
}


def arguments(run_dir, *more):
    """Return the options of 4 epochs of 2 steps."""
    return [
        *("--model=airbench_small", "--data.name=synthetic", "--data.train_images=48"),
        *(
            "--batch=24",
            "--transport.virtual_ranks=2",
            "--epochs=4",
            "--label_smoothing=0.2",
            "--threads=1",
        ),
        *("--data.augment=true", "--data.shift=2", "--data.mirror=alternating"),
        *("--resume=auto", f"--run_dir={run_dir}", *more),
    ]


def runs(root):
    """Yield runs on 1 and 2 ranks, runs stopped after 6 steps, and stopped runs that went on."""
    for name, chosen in CHOSEN.items():
        for ranks in (1, 2):
            yield ranks, arguments(root / f"{name} {ranks}", *chosen)
        yield 1, arguments(root / f"{name} stopped", *chosen, *SIX)
        yield 2, arguments(root / f"{name} moved", *chosen, *SIX)
        yield 1, arguments(root / f"{name} moved", *chosen)


def state(run):
    """Return the last state of a run."""
    return read_checkpoint(latest_checkpoint(run / "checkpoints"))


def test_the_network_has_the_published_size():
    """Oracle: Jordan 2024: 1.97 million parameters in 8 layers."""
    model = models.build("airbench94", classes=10)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 1.97
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == 8
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_whitened_patches_have_covariance_1():
    """Oracle: torch's covariance of the outputs, with channels and pixels mixed beforehand."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=draw)
    images = torch.einsum("ij,njhw->nihw", torch.randn(3, 3, generator=draw), images)
    images = images + images.roll(1, 3) / 2 + images.roll(1, 2) / 3
    images = 10 * images + 5  # the added variance is small beside the images' own
    network = airbench.Airbench(10, 3, WIDTHS)
    network.whiten(images)
    with torch.no_grad():
        outputs = network.whitening(images)
    first, second = outputs.movedim(1, 0).flatten(1).double().chunk(2)
    torch.testing.assert_close(torch.cov(first), torch.eye(12).double(), rtol=0, atol=0.02)
    torch.testing.assert_close(second, -first)


def test_a_constant_image_is_whitened_to_finite_numbers():
    network = airbench.Airbench(10, 3, WIDTHS)
    network.whiten(torch.ones(2, 3, 32, 32))
    assert network.whitening.weight.isfinite().all()


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_first_filters_of_a_group_pass_their_input_through(group, index):
    """Oracle: the input; the remaining filters do something else."""
    conv = models.build("airbench94", classes=10).groups[group][index]
    x = torch.randn(2, conv.in_channels, 6, 6)
    passed, *others = conv(x).split(conv.in_channels, dim=1)
    torch.testing.assert_close(passed, x)
    assert all(other.abs().min() > 0 for other in others)


def test_norms_have_no_scale_and_the_first_weights_are_frozen():
    """Oracle: the names of trained parameters."""
    model = airbench.Airbench(10, 3, WIDTHS)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    shifts = [f"groups.{g}.{i}.bias" for g in range(3) for i in (2, 5)]
    convs = [f"groups.{g}.{i}.weight" for g in range(3) for i in (0, 4)]
    assert sorted(trained) == sorted([*shifts, *convs, "whitening.bias", "head.weight"])
    model.begin_epoch(2)
    assert model.whitening.bias.requires_grad
    model.begin_epoch(3)
    assert not model.whitening.bias.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("run", ["2", "moved"])
@pytest.mark.parametrize("name", CHOSEN)
def test_ranks_and_restarts_change_no_bit(job, name, run):
    """Oracle: an uninterrupted run on one rank; the restart is at the freezing of the bias."""
    expected, found = state(job / f"{name} 1"), state(job / f"{name} {run}")
    model = [key for key in expected if key.startswith("model/")]
    assert (found["trainer/steps"], len(model)) == (8, 39)
    for key in model:
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_the_first_bias_is_trained_for_three_epochs(job, name):
    """Oracle: the states after three and four epochs, and the first 48 images."""
    before, after = state(job / f"{name} stopped"), state(job / f"{name} 1")
    bias = before["model/whitening.bias"]
    assert bias.abs().max() > 0
    assert torch.equal(after["model/whitening.bias"], bias)
    images = datasets.load("synthetic", train_images=48).train_images
    network = airbench.Airbench(10, 3, WIDTHS)
    network.whiten(batches.Normalise(images, torch.device("cpu"))(images))
    for found in (before, after):
        torch.testing.assert_close(found["model/whitening.weight"], network.whitening.weight.data)


def test_label_smoothing_is_of_the_training_alone(tmp_path):
    """Oracle: by hand, a mixture of the label's loss and the mean of all classes' losses."""
    options = ("--lr=0.001", "--batch=360", "--data.train_images=360", "--max_steps=1")
    chosen = ("--optimizer=sgd", "--log_every=1", "--threads=1", "--epochs=1", *options)
    assert train.main([*chosen, "--label_smoothing=0.3", f"--run_dir={tmp_path}"]) == 0
    torch.manual_seed(0)
    model = models.channels_last(models.build("digits_cnn", classes=10, channels=1))
    found = datasets.load("digits", train_images=360)
    normalise = batches.Normalise(found.train_images, torch.device("cpu"))

    def losses(images, labels):
        scores = model(normalise(images)).log_softmax(1)
        return -scores[range(len(labels)), labels].mean(), -scores.mean()

    label, every = losses(found.train_images, found.train_labels)
    saved = state(tmp_path)
    model.load_state_dict({name: saved[f"model/{name}"] for name in model.state_dict()})
    model.eval()
    tested, _ = losses(found.test_images, found.test_labels)
    step, epoch = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert step["loss"] == pytest.approx((0.7 * label + 0.3 * every).item(), rel=1e-5)
    assert epoch["test_loss"] == pytest.approx(tested.item(), rel=1e-5)


@pytest.mark.gate
@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None,
    reason="pytorch_optimizer is not installed; run pip install pytorch_optimizer",
)
def test_the_study_compares_five_optimizers_at_three_rates_or_more(monkeypatch):
    """Oracle: the file's purpose: 80 steps of 250 images each, alike but for the optimizer."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    found = spec.read(root / "jobs" / "studies" / "airbench.yaml")
    chosen = [cell.options for cell in found.cells]
    rates = {(cell.strategy, cell.options.lr) for cell in found.cells}
    assert Counter(name for name, _ in rates) == {
        "sgd": 3,
        "muon": 5,
        "kfac": 3,
        "kfac orthogonal": 3,
        "kfac damped": 3,
    }
    assert {(o.model, o.data.name, o.batch, o.epochs * o.data.train_images) for o in chosen} == {
        ("airbench94", "cifar10", 250, 80 * 250)
    }
    assert {(o.label_smoothing, o.data.shift, o.data.mirror) for o in chosen} == {
        (0.2, 2, "alternating")
    }
    assert found.left_out == ()
