"""Models of which each rank holds a shard, by `fully_shard`, compared with whole models."""

from __future__ import annotations

import datetime
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mpikfac
from mpikfac import AdamGrafting, Coverage, Estimator, KLClip, MemOpt, NoGrafting, Strategy
from mpikfac.trace import Trace
from support import problem

RANKS = mpikfac.world().size
LIMIT = datetime.timedelta(seconds=60)
SHARDED = "sharded-optimizer"
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2}
pytestmark = pytest.mark.skipif(problem.DEVICE.type != "cpu", reason="needs gloo on the CPU")


@pytest.fixture(scope="module", autouse=True)
def gloo(tmp_path_factory):
    """Let torch.distributed connect the processes, too."""
    comm = mpikfac.world()
    place = comm.bcast(str(tmp_path_factory.mktemp("gloo")) if comm.rank == 0 else None)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}/store",
        rank=comm.rank,
        world_size=comm.size,
        timeout=LIMIT,
    )
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_gather(monkeypatch):
    """Fail if a step gathers a sharded tensor; `whole` below may."""

    def refuse(*_args, **_options):
        raise AssertionError("a step must not gather whole tensors")

    monkeypatch.setattr(DTensor, "full_tensor", refuse)
    monkeypatch.setattr(DTensor, "redistribute", refuse)


def whole(tensor):
    """Return a tensor, gathered from the shards of all ranks if it has any."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    shards = [None] * RANKS
    distributed.all_gather_object(shards, tensor.to_local().clone())
    return torch.cat(shards).view(tensor.shape)


class Unused(nn.Linear):
    """A covered layer that the model does not call in the first steps."""


def images():
    """Return a network with uneven and, on some ranks, empty shards, and its batches."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2, groups=1),
        nn.Flatten(),
        nn.Linear(36, 17),
        nn.LayerNorm(17),
        nn.Linear(17, 5),
    )
    return model.double()


def single():
    """Return a network with one tensor."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 5, bias=False)).double()


def transposed():
    """Return a network with a transposed convolution and shared weights."""
    torch.manual_seed(3)
    shared = nn.Linear(8, 8)
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 8),
        shared,
        nn.Tanh(),
        shared,
        nn.Linear(8, 5),
    ).double()


class Words(nn.Module):
    """An embedding and an attention, on the signs of the pixels of an image."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.embedding((x.flatten(1)[:, :6].sign() + 1).long())
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


def words():
    torch.manual_seed(4)
    return Words().double()


def by_root(model):
    """Shard all parameters in one group."""
    return fully_shard(model)


def by_layer(model):
    """Shard each layer with parameters, and then the model."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def by_blocks(model):
    """Shard two blocks of layers, and then the model, whose own group is the remaining layers."""
    fully_shard([*model.children()][:2])
    fully_shard(model[5], reshard_after_forward=False)
    return fully_shard(model)


def trained(make, shard, steps=4, *, begin=None, loss=None, comm=None, **settings):
    """Return the weights and buffers after some steps, and the trainer."""
    model = make()
    if shard is not None:
        shard(model)
    begin = begin or (lambda model, **s: mpikfac.KFACOptimizer(model, 0.01, **s))
    settings = {"strategy": SHARDED} | INTERVALS | settings
    optimizer = begin(model, comm=comm or mpikfac.over(), **settings)
    for step in range(steps):
        inputs, labels = problem.shards(step, RANKS)[distributed.get_rank()]
        optimizer.zero_grad()
        (loss or ordinary)(model, inputs, labels)
        optimizer.step()
    return state_of(model), optimizer.trainer


def ordinary(model, inputs, labels):
    F.cross_entropy(model(inputs), labels).backward()


def state_of(model):
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([whole(tensor).flatten() for tensor in tensors])


def check_same(found, expected, bits=RANKS <= 2):
    """Compare in bits on two ranks, where a sum has one order, and else within rounding."""
    assert len(found) == len(expected)
    if bits:
        assert torch.equal(found, expected), (found - expected).abs().max()
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


CASES = {
    "images, root": (images, by_root),
    "images, layers": (images, by_layer),
    "images, blocks": (images, by_blocks),
    "one tensor": (single, by_root),
    "transposed and shared": (transposed, by_root),
    "attention": (words, by_root),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_trains_like_a_whole_one(case):
    """Oracle: the same strategy with whole weights, in bits on two ranks.

    The norms of weights, which can limit steps, are sums over shards, and therefore rounded.
    """
    make, shard = CASES[case]
    check_same(trained(make, shard)[0], trained(make, None)[0], bits=False)
    no_limit = {"grafting": AdamGrafting(max_trust_ratio=math.inf)}
    check_same(trained(make, shard, **no_limit)[0], trained(make, None, **no_limit)[0])


def test_ranks_of_mpi_train_a_sharded_model(comm):
    """Oracle: the same over the process group, in bits on two ranks."""
    check_same(trained(images, by_layer, comm=comm)[0], trained(images, by_layer)[0])
