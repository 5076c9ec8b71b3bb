"""Models of which each rank holds a shard, by `fully_shard`, compared with whole models."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import mpikfac
from mpikfac import AdamGrafting, Coverage, Estimator, KLClip, MemOpt, NoGrafting, Strategy
from mpikfac.model import Joined
from mpikfac.trace import Trace
from mpikfac_apps.planning.options import PLAN
from mpikfac_apps.planning.plan import plan_of
from mpikfac_apps.problems import models
from support import problem

RANKS = mpikfac.world().size
SHARDED = "sharded-optimizer"
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 2}
pytestmark = [
    pytest.mark.skipif(problem.DEVICE.type != "cpu", reason="needs gloo on the CPU"),
    pytest.mark.usefixtures("gloo"),
]


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
    mesh = tensor.device_mesh
    shards = [None] * mesh.size(mesh.ndim - 1)
    distributed.all_gather_object(shards, tensor.to_local().clone(), mesh.get_group(mesh.ndim - 1))
    return torch.cat(shards).view(tensor.shape)


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
    """Return a network with an embedding and an attention."""
    torch.manual_seed(4)
    return Words().double()


class Block(nn.Module):
    """A residual block, whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


def recomputed():
    """Return a network with activation checkpointing."""
    torch.manual_seed(6)
    ends = nn.Linear(128, 16), nn.Linear(16, 5)
    return nn.Sequential(nn.Flatten(), ends[0], Block(), Block(), ends[1]).double()


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


def trained(make, shard, steps=3, *, begin=None, loss=None, comm=None, **settings):
    """Return the weights and buffers after some steps, and the trainer."""
    model = make()
    if shard is not None:
        shard(model)
    begin = begin or usual
    settings = {"strategy": SHARDED} | INTERVALS | settings
    optimizer = begin(model, comm=comm or mpikfac.over(), **settings)
    for step in range(steps):
        inputs, labels = problem.shards(step, RANKS)[distributed.get_rank()]
        optimizer.zero_grad()
        (loss or ordinary)(model, inputs, labels, step)
        optimizer.step()
    return state_of(model), optimizer.trainer


def usual(model, **settings):
    plain = isinstance(settings.get("grafting"), NoGrafting)
    return mpikfac.KFACOptimizer(model, 0.01, momentum=0.0 if plain else None, **settings)


def momentum(model, **settings):
    """Return K-FAC with SGD, whose momentum and weight decay are on the shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    settings.setdefault("grafting", NoGrafting())
    return mpikfac.Optimizer(mpikfac.KFAC(model, optimizer, **settings))


def ordinary(model, inputs, labels, _step=0):
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


def in_replicas(model):
    """Shard each layer over half of the ranks, or over one of them, with replicas of the shards."""
    shards = RANKS // 2 if RANKS % 2 == 0 else 1
    names = ("replicas", "shards")
    mesh = distributed.init_device_mesh("cpu", (RANKS // shards, shards), mesh_dim_names=names)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(model):
    """Compile each layer, and shard it."""
    for layer in model.children():
        layer.compile(backend="eager")
    return by_layer(model)


CASES = {
    "images, root": (images, by_root),
    "images, layers": (images, by_layer),
    "images, blocks": (images, by_blocks),
    "one tensor": (single, by_root),
    "transposed and shared": (transposed, by_root),
    "attention": (words, by_root),
    "replicas of shards": (images, in_replicas),
    "more replicas than tensors": (single, in_replicas),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_trains_like_a_whole_one(case):
    """Oracle: the same strategy with whole weights, in bits on two ranks."""
    make, shard = CASES[case]
    no_limit = {"grafting": AdamGrafting(max_trust_ratio=math.inf)}
    check_same(trained(make, shard, **no_limit)[0], trained(make, None, **no_limit)[0])


# -- what a step sends ---------------------------------------------------------------------------


def test_ranks_of_mpi_send_the_bytes_of_the_plan_by_two_exchanges(comm):
    """Oracle: the plan, and by hand: the numbers of rows, and one more per parameter and rank.

    The weights are those of the process group.
    """
    trace = Trace()
    found, kfac = trained(images, by_layer, comm=comm, trace=trace)
    check_same(found, trained(images, by_layer)[0])
    rank = comm.rank
    planned = [m for step in range(3) for m in kfac.plan.messages(rank, True, step % 2 == 0, False)]
    for stage in {*trace.sent, *(m.stage for m in planned)}:
        assert trace.sent[stage] == sum(m.bytes for m in planned if m.stage == stage), stage
    if RANKS == 1:
        return
    shards = [p.to_local().numel() + 1 for p in kfac.model.parameters()]
    assert trace.sent["gather gradients"] == 3 * 8 * sum(shards)
    calls = Counter(m.primitive for m in kfac.plan.messages(rank, True, True, False))
    assert calls == {"Alltoallv": 2, "Allreduce": 1, "Reduce_scatter": 1}
    assert trace.calls["gather gradients"] == trace.calls["scatter directions"] == 3


@pytest.mark.parametrize("shard", [by_root, in_replicas])
def test_the_program_shows_the_plan_that_is_executed(comm, shard):
    """Oracle: the plan of the trainer, message by message."""
    model = shard(models.build("digits_cnn"))
    mesh = model[0].weight.device_mesh
    asked = f"--model digits_cnn --ranks {RANKS} --strategy {SHARDED} --budget null --fully_shard"
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    shown = plan_of(PLAN.read([*asked.split(), "--replicas", str(replicas)]))
    executed = mpikfac.KFACOptimizer(model, comm=mpikfac.over(), budget=None).trainer.plan
    for kind in ((False, False), (True, False), (True, True)):
        assert shown.messages(comm.rank, *kind) == executed.messages(comm.rank, *kind)


# -- methods and batches -------------------------------------------------------------------------


def method(kind, model, *, strategy, **settings):
    """Return an optimizer whose owners need no factors of statistics."""
    return kind(model, 0.01, **settings | {"inv_update_steps": 2})


SETTINGS = {
    "limited by the norms of weights": {},
    "no grafting": {"grafting": NoGrafting(), "clip": KLClip(kl_clip=1e-3)},
    "max_norm": {"max_norm": 0.01, "grafting": AdamGrafting(max_trust_ratio=math.inf)},
    "rows": {"grafting": AdamGrafting(normalize_rows=True, max_trust_ratio=math.inf)},
    "eigen, late": {
        "preconditioner": "eigen",
        "strategy": "deferred-sharded",
        "grafting": NoGrafting(),
    },
    "all ranks average factors": {
        "strategy": Strategy(MemOpt(shard_optimizer=True)),
        "grafting": NoGrafting(),
    },
    "forward-only": {"estimator": Estimator(fisher_type="forward-only"), "grafting": NoGrafting()},
    "skip": {"coverage": Coverage(skip=["0", "7"]), "grafting": NoGrafting()},
    "soap": {"preconditioner": "soap"},
    "muon": {"begin": partial(method, mpikfac.DistributedMuon)},
    "distributed shampoo": {"begin": partial(method, mpikfac.DistributedShampoo)},
    "distributed soap": {"begin": partial(method, mpikfac.DistributedSOAP)},
    "momentum and decay of shards": {"begin": momentum},
}
ROUNDED = ("limited by the norms of weights", "max_norm", "soap", "muon", "distributed shampoo")
ROUNDED += ("distributed soap",)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_the_same_effect(name):
    """Oracle: whole weights, in bits on two ranks.

    The norms of weights, which can limit steps, are sums over shards, and therefore rounded.
    """
    settings = SETTINGS[name]
    bits = RANKS <= 2 and name not in ROUNDED
    found, expected = (trained(images, shard, **settings)[0] for shard in (by_layer, None))
    check_same(found, expected, bits)


def in_parts(model, inputs, labels, _step):
    """Accumulate the gradients of two halves of a batch, and reduce them once."""
    halves = [*zip(inputs.chunk(2), labels.chunk(2))]
    for number, half in enumerate(halves):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == len(halves) - 1)
        (F.cross_entropy(model(half[0]), half[1]) / 2).backward()


def evaluated(model, inputs, labels, _step):
    """Evaluate the model after the backward pass, which leaves it with whole weights."""
    ordinary(model, inputs, labels)
    with torch.no_grad():
        model.eval()(inputs)
    model.train()


BEFORE = {"grafting": NoGrafting(), "preconditioner": "eigen"}
PASSES = {
    "evaluated, root": (images, by_root, BEFORE | {"loss": evaluated}),
    "evaluated": (images, by_layer, BEFORE | {"loss": evaluated}),
    "in parts, root": (images, by_root, BEFORE | {"loss": in_parts}),
    "computed again": (recomputed, by_layer, BEFORE),
    "computed again, compiled": (recomputed, compiled, BEFORE | {"factor_update_steps": 2}),
    "in parts": (images, by_layer, BEFORE | {"loss": in_parts}),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_of_a_program_have_the_same_effect(name):
    """Oracle: whole weights, in bits on two ranks."""
    make, shard, settings = PASSES[name]
    check_same(trained(make, shard, **settings)[0], trained(make, None, **settings)[0])


class Branches(nn.Module):
    """Two layers, of which a batch uses one, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = (nn.Linear(128, 5) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        layer = self.first if self.calls < 3 else self.second
        return layer(x.flatten(1)) + self.frozen(x.flatten(1))


def branches():
    torch.manual_seed(5)
    return Branches().double()


def spoiled(model, inputs, labels, step):
    """Give a layer a gradient that is not finite, on the first rank in the second step."""
    ordinary(model, inputs, labels)
    gradient = model[7].weight.grad
    gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if step == 1 and distributed.get_rank() == 0:
        gradient[0] = math.nan


def freezing(model, inputs, labels, step):
    """Freeze a layer for the second step."""
    model[5].requires_grad_(step != 1)
    ordinary(model, inputs, labels)


MISSING = {
    "not finite": (images, by_layer, {"loss": spoiled}),
    "for a step": (images, by_layer, {"loss": freezing, "steps": 4}),
    "of a branch, root": (branches, by_root, {}),
    "of a branch": (branches, by_layer, {}),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_gradients_have_the_same_effect(name):
    """Oracle: whole weights, in bits on two ranks; all other layers are stepped on all ranks."""
    make, shard, settings = MISSING[name]
    settings = {"grafting": NoGrafting()} | settings
    found, expected = (trained(make, each, **settings)[0] for each in (shard, None))
    check_same(found, expected)
    assert found.isfinite().all()


def test_passes_that_were_thrown_away_on_shards_of_zeros():
    """Oracle: a run without the passes; on ranks without rows of a layer, other layers tell."""

    def thrown_away(model, inputs, labels, _step):
        ordinary(model, 2 * inputs, labels)
        for parameter in model.parameters():
            parameter.grad.zero_()
        ordinary(model, inputs, labels)

    settings = {"grafting": NoGrafting(), "preconditioner": "eigen"}
    found = trained(transposed, by_layer, loss=thrown_away, **settings)[0]
    check_same(found, trained(transposed, by_layer, **settings)[0])


@pytest.mark.skipif(RANKS < 2, reason="one rank has no replicas")
def test_replicas_that_differ_are_named():
    """Oracle: the name of the parameter that is different on the second half of the ranks."""
    model = in_replicas(images())
    mesh = model[5].weight.device_mesh
    if mesh.get_local_rank(0):
        with torch.no_grad():
            model[5].weight.to_local().add_(1)
    with pytest.raises(mpikfac.RanksDifferError, match="'5.weight' has different values on rank"):
        mpikfac.KFACOptimizer(model, comm=mpikfac.over())


def test_passes_in_bfloat16():
    """Oracle: autocast's rounding cannot be repeated, so the loss falls as in float32."""

    def run(policy):
        losses = []

        def loss(model, inputs, labels, _step):
            value = F.cross_entropy(model(inputs.float()).float(), labels)
            value.backward()
            assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
            losses.append(value.item())

        def shard(model):
            for layer in model.float().children():
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)

        _, kfac = trained(single, shard, 5, loss=loss)
        assert "1 layers covered" in repr(kfac)
        return torch.tensor(losses)

    rounded = run(MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.testing.assert_close(rounded, run(MixedPrecisionPolicy()), rtol=0.05, atol=0.02)


# -- checkpoints ---------------------------------------------------------------------------------


def steps(optimizer, comm, numbers):
    """Take steps with the same batches on any number of ranks, and return the weights."""
    model = optimizer.trainer.model
    for step in numbers:
        inputs, labels = problem.shards(step, comm.size)[comm.rank]
        optimizer.zero_grad()
        ordinary(model, inputs, labels)
        optimizer.step()
    return model


def begun(shard, begin, comm):
    """Return a new optimizer, with other weights than the saved ones."""
    model = images()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    if shard is not None:
        shard(model)
    return begin(model, comm=comm, strategy=SHARDED, **INTERVALS)


def rms(model, **settings):
    """Return K-FAC with an optimizer whose state has names of its own."""
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001, momentum=0.5)
    settings.setdefault("grafting", NoGrafting())
    return mpikfac.Optimizer(mpikfac.KFAC(model, optimizer, **settings))


@pytest.mark.parametrize("begin", [usual, momentum, rms])
@pytest.mark.parametrize("shard", [by_layer, None, in_replicas])
def test_a_checkpoint_resumes_with_shards_and_without(comm, shard, begin, tmp_path_factory):
    """Oracle: the run that was not interrupted, whose checkpoint is that of shards or of others."""
    root = comm.bcast(tmp_path_factory.mktemp("sharded") if comm.rank == 0 else None)
    group, other = mpikfac.over(), None if shard else by_layer
    saved = begun(shard, begin, group)
    steps(saved, group, range(3))
    path = mpikfac.save_checkpoint(comm, root, saved.trainer.state_dict(), 3)
    expected = state_of(steps(saved, group, range(3, 5)))
    for loaded in (begun(shard, begin, group), begun(other, begin, group)):
        loaded.trainer.load_state_dict(mpikfac.load_checkpoint(comm, path))
        check_same(state_of(steps(loaded, group, range(3, 5))), expected, bits=False)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_of_all_ranks_is_loaded_by_fewer(comm, sharded, tmp_path_factory):
    """Oracle: the weights and the momenta of the checkpoint, whichever rows the ranks have."""
    root = comm.bcast(tmp_path_factory.mktemp("sharded") if comm.rank == 0 else None)
    saved = begun(by_layer, momentum, mpikfac.over())
    steps(saved, mpikfac.over(), range(2))
    path = mpikfac.save_checkpoint(comm, root, saved.trainer.state_dict(), 2)
    expected = everything(saved.trainer, comm)
    fewer = max(1, RANKS - 1)
    mesh = distributed.DeviceMesh("cpu", [*range(fewer)])
    if comm.rank >= fewer:
        return
    group = mpikfac.over(mesh.get_group())
    shard = partial(fully_shard, mesh=mesh) if sharded else None
    loaded = begun(shard, momentum, group)
    loaded.trainer.load_state_dict(mpikfac.load_checkpoint(group, path))
    found = everything(loaded.trainer, group)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_rows_of_other_ranks_are_missing(comm):
    """Oracle: the names of the tensors of which this rank has only some rows."""
    saved = begun(by_layer, momentum, mpikfac.over())
    steps(saved, mpikfac.over(), range(1))
    names = saved.trainer.state_dict().keys()
    missing = saved.trainer.missing(names)
    parts = {name for name, p in saved.trainer.model.named_parameters() if _is_part(p)}
    assert {"model/" + name for name in parts} <= missing
    every = {name for names in comm.allgather([*names]) for name in names}
    assert saved.trainer.missing(every) == set()
    assert len(Joined(dict.fromkeys(every))) == len({name.partition("[")[0] for name in every})


def _is_part(parameter):
    return parameter.to_local().numel() not in (0, parameter.numel())


def everything(trainer, comm):
    """Return the whole tensors of the state of all ranks."""
    states = comm.allgather({k: v for k, v in trainer.state_dict().items() if torch.is_tensor(v)})
    joined = Joined({name: value for state in states for name, value in state.items()})
    return {name: joined[name].clone() for name in joined}


def test_the_state_dict_of_the_optimizer_is_the_ranks_own(comm):
    """Oracle: the run that was not interrupted."""
    group = mpikfac.over()
    saved = begun(by_layer, momentum, group)
    steps(saved, group, range(3))
    model, state = saved.trainer.model.state_dict(), saved.state_dict()
    model, state = ({k: _copy(v) for k, v in one.items()} for one in (model, state))
    expected = state_of(steps(saved, group, range(3, 5)))
    loaded = begun(by_layer, momentum, group)
    loaded.trainer.model.load_state_dict(model)
    loaded.load_state_dict(state)
    check_same(state_of(steps(loaded, group, range(3, 5))), expected)


def test_torchs_checkpoints_of_optimizers_are_refused_by_a_line():
    """Oracle: the line names the function that saves K-FAC's state."""
    optimizer = begun(by_layer, usual, mpikfac.over())
    model = steps(optimizer, mpikfac.over(), range(1))
    with pytest.raises(mpikfac.UserError, match=r"use mpikfac\.save_checkpoint"):
        get_optimizer_state_dict(model, optimizer)


def _copy(value):
    return value.clone() if torch.is_tensor(value) else value
