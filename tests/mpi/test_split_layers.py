"""Layers that are dealt over groups of ranks: numbers, bytes, and refusals."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import DataParallel, Distribution, Strategy, Trace
from mpikfac.comm import Team
from mpikfac.plan import Place, activation_messages, divisors
from support import problem

IMAGES = 12


def multilayer():
    """Return three linear layers in a row."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(128, 24), nn.ReLU(inplace=True), nn.Linear(24, 36), nn.Tanh()),
        *(nn.Linear(36, 12), nn.LayerNorm(12), nn.Linear(12, 5)),
    )


def convolutions():
    """Return convolutions in a row with a linear layer, and normalisation in between."""
    return nn.Sequential(
        *(nn.Conv2d(2, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12).eval(), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(24, 12, 3, padding=1, padding_mode="circular"), nn.AvgPool2d(2), nn.Flatten()),
        nn.Linear(12, 5),
    )


class Branches(nn.Module):
    """Two branches and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(128, 24), nn.Linear(128, 24)
        self.twice, self.last = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x):
        x = x.flatten(1)
        left, right = self.left(x).tanh(), self.right(x).sigmoid()
        joined = self.twice(left) + self.twice(left * right).relu() + right
        return self.last(joined)


ROW = {"1": "outputs", "3": "inputs", "5": "outputs"}
AXES = {
    multilayer: [
        *({"1": "outputs"}, {"3": "inputs"}, ROW, {"1": "inputs", "3": "outputs"}),
        *({"1": "outputs", "3": "outputs", "5": "outputs"}, {"3": "inputs", "5": "inputs"}),
    ],
    convolutions: [
        *({"3": "outputs", "6": "inputs"}, {"3": "inputs", "6": "outputs", "9": "inputs"}),
        *({"0": "outputs", "9": "inputs"}, {"6": "inputs", "9": "inputs"}),
    ],
    Branches: [
        {"left": "outputs", "right": "inputs", "twice": "outputs", "last": "inputs"},
    ],
}
CASES = [(make, axes) for make, several in AXES.items() for axes in several]
TRAINERS = ("sgd", "adam", "eigen", "ekfac", "owners")


def model_of(make):
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = make()
    return model.to(problem.DEVICE, torch.float64)


def distributions(comm, axes):
    """Yield all ways to form groups of several ranks."""
    for ways, strided in itertools.product(divisors(comm.size)[1:], (False, True)):
        yield Distribution(ways, axes, strided)


def trainer_of(kind, model, comm, trace=None):
    """Return a trainer with Adam or SGD, or with K-FAC."""
    optimizer = problem.adam(model) if kind == "adam" else problem.sgd_all(model)
    if kind in ("sgd", "adam"):
        return DataParallel(model, optimizer, comm, trace=trace)
    settings = {**problem.SETTINGS, "solver": "ekfac" if kind == "ekfac" else "eigen"}
    strategy = None
    if kind == "owners":
        strategy = Strategy.mem_opt(reduction="owners", update="owner")
    return problem.kfac(model, optimizer, comm, strategy, trace=trace, **settings)


def train(comm, make, kind, distribution=None, steps=problem.STEPS):
    """Return losses, the last gradients, weights and factors of a run."""
    model = model_of(make)
    split = distribution and mpikfac.split_layers(model, comm, distribution)
    trainer, losses = trainer_of(kind, model, comm), []
    for step in range(steps):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        trainer.optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        losses.append(sum(comm.allgather(loss.item())) / comm.size)
        loss.backward()
        trainer.step()
    found = {"losses": torch.tensor(losses), "weights": problem.state(model)}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if kind != "owners":
        found["gradients"] = torch.cat([g.flatten() for g in grads]).cpu()
    state = problem.whole_state(trainer, comm)
    for name in sorted(state):
        if name.startswith(("kfac/factors", "kfac/scales")):
            found[name] = state[name].flatten()
    if kind not in ("sgd", "adam"):
        trainer.close()
        assert any(name.startswith("kfac/factors") for name in found)
    trainer.detach()
    if split:
        split.detach()
    return found


serial = problem.by_one_process(lambda comm, make, kind: train(comm, make, kind))


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("make, axes", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_numbers_are_those_of_one_process(comm, make, axes, kind):
    """Oracle: a run of the ordinary model in one process; all groups of ranks."""
    expected = serial(make, kind)
    for distribution in distributions(comm, axes):
        found = train(comm, make, kind, distribution)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)
