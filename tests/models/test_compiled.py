"""Compiled networks keep their graph: with a backend that only counts, and with inductor."""

from __future__ import annotations

import os
import shutil
from functools import partial

import pytest
import torch
from torch import nn

from mpikfac_apps.problems import models
from mpikfac_apps.problems.resnet import Bottleneck, conv, projection, stage
from support import zoo
from support.compiled import Problem, check, fresh

IMAGES = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 10
COMPILER = os.environ.get("CXX", "g++")
OF_OTHERS = "transformers bert", "transformers llama"


def narrow_resnet50():
    """Return a ResNet-50 of a sixteenth of the width."""
    shapes = (8, 4, 3, 1), (16, 8, 4, 2), (32, 16, 6, 2), (64, 32, 3, 2)
    stages = [stage(Bottleneck, *shape, projection) for shape in shapes]
    stem = conv(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


OWN = {
    "resnet20": partial(models.build, "resnet20"),
    "resnet50": narrow_resnet50,
    "vit_small": partial(models.build, "vit_small"),
}


def problem(name):
    """Return the network of the name, and a batch."""
    if name in OWN:
        return Problem(OWN[name], IMAGES, LABELS)
    if zoo.missing():
        pytest.skip(f"{' and '.join(zoo.missing())} not installed")
    subject = zoo.asked(name)
    return Problem(subject.copied, *subject.batch(4, seed=0), subject.coverage)


@pytest.fixture(autouse=True)
def _no_graphs():
    yield
    fresh()


def check_all(name, backend):
    """Compare the network's compiled training with SGD's, and with a copy's."""
    if backend == "inductor" and not shutil.which(COMPILER):
        pytest.skip(f"inductor needs a C++ compiler, and there is no {COMPILER} on PATH")
    check(problem(name), backend)


@pytest.mark.gate
def test_a_deep_network_keeps_its_graph():
    """Oracle: graphs, operations and breaks with SGD; gradients of a copy of the model."""
    check_all("resnet50", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN, *OF_OTHERS])
def test_ordinary_steps_run_the_code_of_inductor(name):
    """Oracle: graphs, operations and breaks with SGD; gradients of a copy of the model."""
    check_all(name, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_networks_of_others_keep_their_graphs(name):
    """Oracle: graphs, operations and breaks with SGD; gradients of a copy of the model."""
    check_all(name, "eager")
