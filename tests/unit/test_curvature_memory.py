"""The planned memory of influence functions and of variances, compared with tensors that exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.lab import (
    Curvature,
    influence,
    influence_memory,
    output_variances,
    self_influence,
    variances_memory,
)
from support import inside
from support.allocated import Allocated
from support.curved import losses

pytestmark = pytest.mark.lab

EXAMPLES, QUERIES, PRIORS = 64, 20, 33


@pytest.fixture
def curvature():
    """Return the curvature of a network with convolutions of many positions."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    coverage = mpikfac.Coverage(skip=["1"])
    batch = torch.randn(16, 3, 16, 16)
    return Curvature.measured(
        model.eval(),
        lambda model, x: model(x),
        [batch],
        eigenvalues="products",
        coverage=coverage,
        skip=["1"],
    )


def data(count):
    return torch.randn(count, 3, 16, 16), torch.randint(10, (count,))


def outputs(model, batch):
    return model(batch[0])


def counted(call):
    """Return the largest number of bytes of tensors that the call creates at a time."""
    with Allocated() as allocated:
        call()
    return allocated.peak


@pytest.mark.parametrize("elements", [2**24, 2**18])
def test_the_plan_is_what_is_allocated(curvature, monkeypatch, elements):
    """Oracle: all storages that exist at a time, counted operation by operation."""
    inside.elements_at_a_time(monkeypatch, elements)
    examples, queries = data(EXAMPLES), data(QUERIES)
    one = [tensor[:1] for tensor in examples]
    planned = influence_memory(curvature, losses, one, EXAMPLES, QUERIES)
    found = {
        "influence": counted(lambda: influence(curvature, losses, [examples], queries)),
        "self-influence": counted(lambda: self_influence(curvature, losses, [examples])),
    }
    planned["variances"] = variances_memory(curvature, outputs, one, EXAMPLES, PRIORS)
    priors = list(range(1, PRIORS + 1))
    found["variances"] = counted(
        lambda: output_variances(curvature.replicate(), outputs, examples, EXAMPLES, priors)
    )
    for phase, parts in planned.items():
        assert 0.85 < found[phase] / sum(parts.values()) <= 1, phase


class Odd(nn.Module):
    """A wide layer, a buffer that is not saved, and a state that is no tensor.

    It drops the dimension of a single example.
    """

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(300, 400)
        self.register_buffer("scale", torch.ones(400), persistent=False)

    def get_extra_state(self):
        return "state"

    def set_extra_state(self, state):
        pass

    def forward(self, x):
        return (self.wide(x) * self.scale).squeeze()


def test_the_plan_of_a_wide_layer_and_few_examples():
    """Oracle: all storages that exist at a time, at most the plan; two examples are passed."""
    model, x = Odd().eval(), torch.randn(4, 300)

    def squares(model, x):
        return model(x).square().sum(1)

    curvature = Curvature.measured(
        model, lambda model, x: model(x), [x], fisher_type="mc", eigenvalues="products"
    )
    planned = influence_memory(curvature, squares, x[:2], 4, 4)
    found = {
        "influence": counted(lambda: influence(curvature, squares, [x], x)),
        "self-influence": counted(lambda: self_influence(curvature, squares, [x])),
    }
    for phase, parts in planned.items():
        assert found[phase] <= sum(parts.values()), phase
