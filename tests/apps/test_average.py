"""Averages of the weights over steps: their numbers, tests of the network, restarts, ranks."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac_apps.inspecting import export
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import train
from mpikfac_apps.training.augmentation.moves import Augmentation
from mpikfac_apps.training.batches import Batches, Normalise
from mpikfac_apps.training.parts.optimizers import Average
from mpikfac_apps.training.parts.problem import PASS, SAMPLE
from mpikfac_apps.training.run import Run

CLOCKS = ("seconds", "images_per_second", "communication")
QUICK = ("--batch=120", "--data.train_images=360", "--epochs=3", "--log_every=2", "--threads=1")
DECAY = 0.7  # below 1 - 1/k from the fourth step on
STEPS = 9  # 3 steps are an epoch
VIRTUAL = "--transport.virtual_ranks=4"
CODER = ("--model=autoencoder_small", "--kfac.fisher_type=type-2")
PLAIN = {"momentum": 0, "weight_decay": 0, "schedule": "constant", "kfac.damping": 0.02}
OPTIMIZERS = {
    "sgd": ("--optimizer=sgd",),
    "adamw": ("--optimizer=adamw",),
    "kfac": ("--kfac.inv_update_steps=2",),
    "owner": (
        "--strategy=mem-opt",
        "--assignment.shard_optimizer=true",
        "--assignment.colocate_factors=false",
    ),
    "quadratic": (
        *(*CODER, "--kfac.grafting=quadratic-model"),
        *(f"--{name}={value}" for name, value in PLAIN.items()),
    ),
}


def arguments(run_dir, *more, average=DECAY):
    return [*QUICK, f"--ema_decay={average}", f"--run_dir={run_dir}", *more]


def rows(run_dir):
    """Return lines of metrics without times."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in CLOCKS} for row in lines]


def saved(run_dir, start=""):
    """Return the items of the last checkpoint whose names begin with a text."""
    path = mpikfac.checkpoint.latest_checkpoint(run_dir / "checkpoints")
    checkpoint = mpikfac.checkpoint.read_checkpoint(path)
    return {name: checkpoint[name] for name in checkpoint if name.startswith(start)}


def assert_same(found, expected):
    """Check that items are equal to the last bit."""
    assert found.keys() == expected.keys() != set()
    for name, item in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(item)), name


def by_hand(numbers, decay):
    """Return the average of the numbers by the formula of Martens and Grosse (2015)."""
    average = 0.0
    for k, number in enumerate(numbers, 1):
        xi = min(1 - 1 / k, decay)
        average = xi * average + (1 - xi) * number
    return average


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_average_follows_the_formula(count):
    """Oracle: the formula, in plain Python; up to 3 steps, the mean."""
    model = nn.Linear(1, 1, bias=False).double()
    average, numbers = Average(model, DECAY), [1.0, 5.0, -2.0, 3.0, 0.5, 8.0, -4.0, 6.0][:count]
    for number in numbers:
        with torch.no_grad():
            model.weight.fill_(number)
        average.add(model)
    found = average.model([]).weight.item()
    assert found == pytest.approx(by_hand(numbers, DECAY), rel=1e-14)
    if count <= 3:
        assert found == pytest.approx(sum(numbers) / count, rel=1e-14)


def test_statistics_are_of_the_averaged_weights_alone():
    """Oracle: means and variances of the batches; the model and the next average stay."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    average = Average(model, DECAY)
    inputs = torch.randn(2, 8, 2, dtype=torch.float64)
    model(100 + inputs[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average.add(model)
    tested = average.model(inputs)
    outputs = [model[0](batch) for batch in inputs]
    means, variances = (
        torch.stack([f(x, 0) for x in outputs]).mean(0) for f in (torch.mean, torch.var)
    )
    torch.testing.assert_close(tested[1].running_mean, means)
    torch.testing.assert_close(tested[1].running_var, variances)
    assert_same(model.state_dict(), before)
    average.add(model)
    assert torch.equal(average.state()["average/1.running_mean"], model[1].running_mean)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def whole(request, tmp_path_factory):
    """Return options, directory and weights after each step of an uninterrupted run."""
    root, weights = tmp_path_factory.mktemp("whole"), []
    own = Run.step

    def step(self, *args):
        own(self, *args)
        weights.append({n: p.detach().clone() for n, p in self.model.named_parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", step)
        assert train.main(arguments(root, *OPTIMIZERS[request.param])) == 0
    return OPTIMIZERS[request.param], root, weights


@pytest.mark.gate
def test_the_average_is_that_of_the_weights_after_every_step(whole):
    """Oracle: the formula on the weights that the run had, in float64."""
    _, root, weights = whole
    assert len(weights) == STEPS == saved(root)["run/averaged"]
    items = saved(root, "average/")
    for name in weights[0]:
        expected = by_hand([step[name].double() for step in weights], DECAY)
        torch.testing.assert_close(
            items[f"average/{name}"].double(), expected, rtol=1e-5, atol=1e-7
        )
        assert not torch.equal(items[f"average/{name}"], saved(root)[f"model/{name}"])


def test_metrics_are_those_of_the_exported_average(whole, tmp_path):
    """Oracle: the network with exported weights, on all test images at once; another run's file."""
    _, root, _ = whole
    file, raw = tmp_path / "average.pt", tmp_path / "weights.pt"
    assert export.main([str(root), "--average", str(file), "--weights", str(raw)]) == 0
    found = datasets.load("digits")
    coder = "test_error" in rows(root)[-1]
    model = models.build("autoencoder_small" if coder else "digits_cnn", 10, 1)
    losses = []
    for path in (file, raw):
        model.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            if coder:
                inputs = found.test_images.float() / 16
                loss = F.binary_cross_entropy_with_logits(model(inputs), inputs.flatten(1))
            else:
                normalise = Normalise(found.train_images[:360], torch.device("cpu"))
                inputs = normalise(found.test_images)
                loss = F.cross_entropy(model.eval()(inputs), found.test_labels)
        losses.append(loss.item())
    assert rows(root)[-1]["test_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 7])
def test_a_resumed_run_goes_on_exactly(tmp_path, whole, stop):
    """Oracle: metrics and items of the uninterrupted run; an epoch is 3 steps."""
    chosen, expected, _ = whole
    assert train.main(arguments(tmp_path, *chosen, f"--max_steps={stop}")) == 0
    assert train.main(arguments(tmp_path, *chosen, "--resume=auto")) == 0
    assert rows(tmp_path) == rows(expected)
    assert_same(saved(tmp_path, "average/"), saved(expected, "average/"))


@pytest.mark.gate
def test_training_does_not_notice_the_average(tmp_path):
    """Oracle: the run without averages, to the last bit."""
    for average in (0, DECAY):
        assert train.main(arguments(tmp_path / str(average), average=average)) == 0
    without, averaged = tmp_path / "0", tmp_path / str(DECAY)
    assert_same(saved(averaged, "model/"), saved(without, "model/"))
    assert not saved(without, "average/")
    assert rows(averaged)[-1]["train_loss"] == rows(without)[-1]["train_loss"]
    assert rows(averaged)[-1]["test_loss"] != rows(without)[-1]["test_loss"]
    assert "averaging starts now" not in (averaged / "log.txt").read_text()


def test_a_run_may_begin_to_average_later(tmp_path):
    """Oracle: after a single step, the average is the weights."""
    assert train.main(arguments(tmp_path, "--max_steps=4", average=0)) == 0
    assert train.main(arguments(tmp_path, "--max_steps=5", "--resume=auto")) == 0
    assert "no averaged weights; averaging starts now" in (tmp_path / "log.txt").read_text()
    items = saved(tmp_path)
    assert items["run/averaged"] == 1
    kept = saved(tmp_path, "average/")
    assert_same(kept, {name: items[name.replace("average/", "model/")] for name in kept})


@pytest.mark.parametrize("steps", [-1, 1.5, "many"])
def test_forged_averages_are_refused(steps):
    """Oracle: the name of the item."""
    average = Average(nn.Linear(2, 2), DECAY)
    with pytest.raises(ValueError, match="item 'run/averaged' must be a number"):
        average.load(average.state() | {"run/averaged": steps})
    with pytest.raises(ValueError, match=r"item 'average/bias' must be float32 \[2\]"):
        average.load(average.state() | {"average/bias": torch.zeros(3)})


def test_a_sample_is_the_same_on_all_ranks():
    """Oracle: a second rank; images are training images, each at most once."""
    found = datasets.load("digits")
    images, labels = found.train_images[:1200], found.train_labels[:1200]
    drawn = [
        torch.cat(list(mine.sample(SAMPLE, PASS)))
        for mine in (
            Batches(images, labels, 100, seed=3, augment=Augmentation(), rank=rank, ranks=2)
            for rank in (0, 1)
        )
    ]
    assert torch.equal(*drawn) and len(drawn[0]) == SAMPLE
    assert {image.numpy().tobytes() for image in drawn[0]} <= {i.numpy().tobytes() for i in images}


def runs(root):
    """Yield ranks and options of runs on several ranks."""
    for ranks in (1, 2):
        for name in ("sgd", "kfac", "owner"):
            chosen = (*OPTIMIZERS[name], "--model=plain")
            yield ranks, arguments(root / f"{name} {ranks}", *chosen)
        yield ranks, arguments(root / f"in parts {ranks}", "--transport.virtual_ranks=4")
        yield (
            ranks,
            arguments(root / f"dropped {ranks}", "--transport.virtual_ranks=4", "--model=dropped"),
        )
    moved = arguments(root / "moved", "--transport.virtual_ranks=4")
    yield 2, [*moved, "--max_steps=4"]
    yield 1, [*moved, "--resume=auto"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "kfac", "owner"])
def test_two_ranks_average_as_one(job, name):
    """Oracle: one rank, to rounding. A checkpoint compares the averages of the ranks."""
    one, two = (rows(job / f"{name} {ranks}")[-1] for ranks in (1, 2))
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "one"),
    [("in parts 2", "in parts 1"), ("moved", "in parts 1"), ("dropped 2", "dropped 1")],
)
def test_sums_in_order_make_the_same_averages_on_all_numbers_of_ranks(job, other, one):
    """Oracle: one rank, to the last bit, statistics of BatchNorm after dropout included."""
    assert_same(saved(job / other, "average/"), saved(job / one, "average/"))
