"""The recipes for ResNet-50 on ImageNet: numbers, the plan of 32 ranks, and two steps of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpikfac import Eigen
from mpikfac_apps.inspecting import pack
from mpikfac_apps.options.by_epoch import numbers_of
from mpikfac_apps.options.parse import parse
from mpikfac_apps.options.strategy import coverage, learning_rate, make_plan, make_strategy
from mpikfac_apps.problems import models
from support import pictures

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
RECIPES = ("imagenet_resnet50_kfac", "imagenet_resnet50_sgd")
RANKS = 32
IMAGES = 1_281_167  # of ImageNet-1k
SMALL = ("--model=digits_cnn", "--data.size=14", "--data.workers=0", "--batch_per_rank=6")


def recipe(name, *more):
    return [f"--config={CONFIGS / name}.yaml", *more]


def chosen(name):
    return parse(recipe(name, "--data.path=somewhere"), RANKS)


@pytest.mark.parametrize(
    ("name", "epochs", "falls"),
    [
        ("imagenet_resnet50_kfac", 55, (25, 35, 40, 45, 50)),
        ("imagenet_resnet50_sgd", 90, (30, 60, 80)),
    ],
)
def test_the_rate_is_the_published_rate(name, epochs, falls):
    """Oracle: by hand, 0.0125 for a GPU of 32 images; a tenth at each fall [SC20]."""
    options = chosen(name)
    assert (options.epochs, options.batch, options.data.augment) == (epochs, 1024, True)
    steps = IMAGES // 1024
    rate = learning_rate(options, steps, RANKS)
    assert rate(0) == pytest.approx(0.0125)
    assert rate(5 * steps) == pytest.approx(0.4)
    for number, epoch in enumerate(falls, start=1):
        before, after = rate(epoch * steps - 1), rate(epoch * steps)
        assert (before, after) == (
            pytest.approx(0.4 / 10 ** (number - 1)),
            pytest.approx(0.4 / 10**number),
        )
    assert rate(epochs * steps - 1) == after


def test_curvature_is_as_published():
    """Oracle: the job of 64 GPUs in the code of the paper, with the defaults of its program."""
    options = chosen("imagenet_resnet50_kfac").kfac
    damping = options.damping.number
    assert [damping(epoch) for epoch in (0, 39.9, 40, 54.9)] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert numbers_of(damping) == (1e-3, 5e-4)
    assert (options.factor_update_steps, options.inv_update_steps, options.preconditioner) == (
        10,
        100,
        Eigen(),
    )
    assert (options.clip.kl_clip, options.estimator.factor_decay) == (1e-3, 0.95)


def test_the_recipe_plans_for_32_ranks():
    """Oracle: ResNet-50 has 53 convolutions and a linear layer; every rank is a worker."""
    options = chosen("imagenet_resnet50_kfac")
    shapes = models.shapes_of(options.model, 1000, coverage(options.kfac))
    strategy, settings = make_strategy(options.distribution, options.kfac, RANKS)
    plan = make_plan(options.kfac, *shapes, RANKS, strategy, settings["preconditioner"])
    assert (len(plan.layers), plan.grid.workers, plan.preconditioner) == (54, RANKS, "eigen")
    assert len(set(plan.owners.values())) == RANKS


# -- runs ------------------------------------------------------------------------------------------


def runs(root):
    path = pictures.noise(root / "images")
    assert pack.main([str(path), str(root / "images.h5")]) == 0
    short = ("--max_steps=2", "--log_every=1", "--threads=1")
    for name in RECIPES:
        for kind, place in (("folder", path), ("packed", root / "images.h5")):
            data = f"--data.name={kind}", f"--data.path={place}"
            yield 2, recipe(name, *SMALL, *data, *short, f"--run_dir={root / name / kind}")


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["folder", "packed"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_small_network_takes_two_steps_of_the_recipe(job, name, kind):
    """Oracle: rates by hand: 0.0125 on 2 ranks rises to 0.025 in 5 epochs of 4 steps."""
    lines = (job / name / kind / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    assert [row["lr"] for row in rows] == pytest.approx([0.0125, 0.0125 * 1.05])
    assert ("kl_scale" in rows[0]) == name.endswith("kfac")


@pytest.mark.gate
@pytest.mark.parametrize("name", RECIPES)
def test_a_packed_file_gives_the_losses_of_the_folder(job, name):
    """Oracle: the folder; the first loss of 3 classes with 10 % of smoothing is about log 3."""
    found = []
    for kind in ("folder", "packed"):
        lines = (job / name / kind / "metrics.jsonl").read_text().splitlines()
        found.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert found[0] == found[1]
    assert 0.5 < found[0][0] < 3
