"""Compiled models keep their graph: hooks are there in steps with new factors alone."""

from __future__ import annotations

import gc

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mpikfac
from mpikfac_apps.problems import models

INTERVALS = {"factor_every": 3, "basis_every": 3}
IMAGES = torch.rand(8, 3, 32, 32)
LABELS = torch.arange(8) % 10


@pytest.fixture(autouse=True)
def _no_graphs():
    gc.collect()  # trainers of other tests end
    torch.compiler.reset()
    counters.clear()
    yield
    assert stance() == "default"  # a test leaves the process as before
    torch.compiler.reset()


def stance():
    """Return the stance of torch's compiler."""
    return torch._dynamo.eval_frame._stance.stance


class Encoder(nn.Module):
    """A transformer's layer over rows of pixels, and a head."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(96, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2)).mean(1))


def gated():
    """Return a network with a cell, which takes the place of an inner product."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 12), nn.GRUCell(12, 8), nn.Linear(8, 10))


NETWORKS = {
    "resnet20": lambda: models.build("resnet20"),
    "mobilenet": lambda: models.build("mobilenet_small"),
    "encoder": Encoder,
    "gated": gated,
}


def made(name):
    """Return the network of the name, always with the same weights."""
    torch.manual_seed(0)
    return NETWORKS[name]()


def descend(optimizer, call, steps=7):
    """Train for some steps; return the weights."""
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(IMAGES), LABELS).backward()
        optimizer.step()
    (group,) = optimizer.param_groups
    return torch.cat([parameter.detach().flatten() for parameter in group["params"]])


def counted(network, optimizer, call=None):
    """Train a compiled network; return graphs, operations and breaks, and the weights."""
    counters.clear()
    backend = CompileCounterWithBackend("eager")
    weights = descend(optimizer, torch.compile(call or network, backend=backend))
    breaks = sum(counters["graph_break"].values())
    return (backend.frame_count, backend.op_count, breaks), weights


@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_model_has_the_graphs_that_it_has_without_kfac(name):
    """Oracle: the counts of torch's compiler with SGD; the weights without compilation."""
    network = made(name)
    expected, _ = counted(network, torch.optim.SGD(network.parameters(), 0.01))
    torch.compiler.reset()
    network = made(name)
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    found, weights = counted(network, optimizer)
    assert found == expected and found[0] > 0
    optimizer.trainer.close()
    network = made(name)
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    assert torch.equal(weights, descend(optimizer, network))
    optimizer.trainer.close()


def test_a_model_may_be_called_before_the_optimizer_is_made():
    """Oracle: the weights without compilation."""
    network = made("resnet20")
    compiled = torch.compile(network, backend="eager")
    with torch.no_grad():
        compiled.eval()(IMAGES)
    compiled.train()
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    weights = descend(optimizer, compiled)
    optimizer.trainer.close()
    network = made("resnet20")
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    assert torch.equal(weights, descend(optimizer, network))
    optimizer.trainer.close()


def test_steps_without_new_factors_have_no_hooks():
    """Oracle: the model's own hooks."""
    network = made("gated")
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    found = []
    for _ in range(7):
        found.append((sum(len(m._forward_hooks) for m in network.modules()), stance()))
        descend(optimizer, network, 1)
    assert [hooks > 0 for hooks, _ in found] == [True, False, False] * 2 + [True]
    assert [kind for _, kind in found] == ["force_eager", "default", "default"] * 2 + [
        "force_eager"
    ]
    optimizer.trainer.close()


def test_trainers_share_the_stance_until_the_last_has_ended():
    """Oracle: by hand; a trainer that is dropped counts as ended."""
    nets = [made("gated") for _ in range(3)]
    trainers = [
        mpikfac.KFAC(net, torch.optim.SGD(net.parameters(), 0.01), MPI.COMM_SELF) for net in nets
    ]
    trainers[1].close()
    trainers[0].detach()
    assert stance() == "force_eager"
    del trainers, nets
    gc.collect()
    assert stance() == "default"


def test_a_failed_step_can_be_repeated_and_the_stance_ends():
    """Oracle: the weights without the failure."""
    expected = made("gated")
    optimizer = mpikfac.KFACOptimizer(expected, **INTERVALS)
    weights = descend(optimizer, expected, 4)
    optimizer.trainer.close()
    network = made("gated")
    optimizer = mpikfac.KFACOptimizer(network, **INTERVALS)
    descend(optimizer, network, 3)
    with pytest.raises(RuntimeError):
        network(IMAGES[:, :1])
    descend(optimizer, network, 1)
    found = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    optimizer.trainer.close()
    assert torch.equal(found, weights)
