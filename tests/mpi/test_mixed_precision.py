"""Mixed precision on several ranks: if any rank overflows, all ranks skip the step."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import BFloat16, CommOpt, Compression, Int8, MemOpt, Refresh, Strategy, Transport
from mpikfac.lab import PowerSGD, TopK
from support import inside, problem

RANKS = mpikfac.world().size
SETTINGS = problem.SETTINGS | {"factor_update_steps": 1, "inv_update_steps": 1}
ALL = ["sgd", *problem.strategies(RANKS)]
BAD = itertools.cycle([math.nan, math.inf, -math.inf])
OTHERS = [
    *(
        Strategy(
            CommOpt(factor_reduction="reduce_scatter", shard_optimizer=shards),
            transport=Transport(reduce_factors_at="inverses"),
        )
        for shards in (False, True)
    ),
    Strategy(MemOpt(shard_optimizer=True), transport=Transport(owner_sums="alltoall")),
    Strategy(CommOpt(), transport=Transport(ranks_per_node=RANKS)),
    Strategy(CommOpt(), refresh=Refresh(staleness=1)),
]
WIRES = [
    Compression(factors=Int8(), gradients=wire) for wire in (BFloat16(), Int8(), TopK(), PowerSGD())
]


def trainer(comm, strategy, dtype=torch.float64):
    model = problem.network().to(dtype)
    if strategy == "sgd":
        return mpikfac.FirstOrderTrainer(model, problem.sgd(model), comm)
    return problem.kfac(model, problem.sgd(model), comm, strategy, **SETTINGS)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)


def step(trainer, comm, number, scale, bad=None):
    """Take a step; a layer's gradient on the last rank may be multiplied by `bad`."""
    images, labels = problem.shards(number, comm.size)[comm.rank]
    trainer.optimizer.zero_grad()
    loss = F.cross_entropy(trainer.model(images), labels)
    scale.scale(loss).backward()
    if bad is not None and comm.rank == comm.size - 1:
        trainer.model[3].bias.grad *= bad
    trainer.step(scale)


def everything(trainer):
    """Return copies of this rank's state between steps, without communication."""
    found = dict(trainer.model.state_dict())
    for number, state in enumerate(trainer.optimizer.state.values()):
        found |= {f"{number}/{key}": value for key, value in state.items()}
    if isinstance(trainer, mpikfac.KFAC):
        found |= inside.factors(trainer) | {f"{n}#": w for n, w in inside.weights(trainer).items()}
        found |= inside.bases(trainer)
    return {name: value.clone() for name, value in found.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert different == []


@functools.cache
def unspoiled(strategy):
    """All that this rank holds after four good steps, and the scale of the loss."""
    kfac, plain = trainer(mpikfac.world(), strategy), scaler()
    for number in range(4):
        if number == 2:
            inside.grid(kfac).encoded.reset()
        step(kfac, inside.grid(kfac).world, number, plain)
    assert kfac.steps == 4
    return everything(kfac), plain.get_scale()


def assert_skips(comm, strategy, bad):
    """Check that all ranks skip a step completely, and that votes come back."""
    one, scale = trainer(comm, strategy), scaler()
    for number in range(4):
        if number == 2:
            before = everything(one)
            one.votes[0] = comm.rank + 1
            step(one, comm, 9, scale, bad)
            assert one.votes.tolist()[:8] == pytest.approx([(comm.size + 1) / 2] + 7 * [0.0])
            assert_equal(everything(one), before)
            assert comm.allgather(scale.get_scale()) == comm.size * [2.0**9]
        step(one, comm, number, scale)
    expected, grown = unspoiled(strategy)
    assert_equal(everything(one), expected)
    assert one.steps == 5
    assert comm.allgather(scale.state_dict()) == comm.size * [scale.state_dict()]
    assert comm.allgather(grown) == comm.size * [2.0**11]
    state = problem.state(one.model)
    assert all(torch.equal(state, others) for others in comm.allgather(state))


@pytest.mark.parametrize(("strategy", "bad"), list(zip(ALL, BAD)), ids=problem.label)
def test_what_overflows_on_one_rank_is_skipped_by_all(comm, strategy, bad):
    """Oracle: the state before, and the run without the skipped batch, to the last bit."""
    assert_skips(comm, strategy, bad)


@pytest.mark.parametrize("strategy", OTHERS, ids=str)
def test_however_it_is_sent(comm, strategy):
    """Oracle: the same."""
    assert_skips(comm, strategy, math.inf)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.gradients.name)
def test_whatever_it_is_encoded_in(comm, wire, shards):
    """Oracle: the same; the compared run forgets encoding losses at the skipped step."""
    assert_skips(comm, Strategy(MemOpt(shard_optimizer=shards), compression=wire), math.inf)


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_a_power_of_two_changes_nothing(comm, strategy):
    """Oracle: the steps of the plain loss, to the last bit."""
    scaled, plain, scale = trainer(comm, strategy), trainer(comm, strategy), scaler()
    for number in range(4):
        step(scaled, comm, number, scale)
    problem.run(plain, comm)
    assert_equal(everything(scaled), everything(plain))


@pytest.mark.parametrize("spoil", ["variance", "votes"])
def test_numbers_of_one_rank_skip_no_step_of_all_ranks(comm, spoil):
    """Oracle: all ranks take the step that the scaler takes; only gradients count."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).to(problem.DEVICE)
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    inputs, scale = torch.randn(8, 4).to(problem.DEVICE), scaler()
    if comm.rank == comm.size - 1:
        inputs[0, 0] = 1e25 if spoil == "variance" else 1.0
        kfac.votes[0] = math.nan if spoil == "votes" else 0.0
    scale.scale(model(inputs).square().mean()).backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # an average over ranks
    scale.unscale_(kfac.optimizer)
    kfac.precondition(scale)
    assert comm.allgather("kfac/started" in kfac.state_dict()) == [True] * comm.size


def test_a_rank_without_a_loss_follows_the_scale(comm):
    """Oracle: the scaler's state of rank 0, which alone has examples."""
    model = problem.network()
    baseline = mpikfac.FirstOrderTrainer(model, problem.sgd(model), comm)
    scale = scaler()
    if comm.rank == 0:
        images, labels = problem.shards(0, 1)[0]
        scale.scale(F.cross_entropy(model(images), labels)).backward()
    baseline.step(scale, examples=len(images) if comm.rank == 0 else 0)
    assert comm.allgather(scale.get_scale()) == [2.0**10] * comm.size


def test_a_rank_that_steps_nothing_knows_of_skips(comm):
    """Oracle: the weights and the scale of a batch that overflows on the last rank, on all ranks.

    The only layer belongs to rank 0.
    """
    model = nn.Sequential(nn.Linear(2, 2)).to(problem.DEVICE)
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters()), comm, "sharded-optimizer")
    scale, found = scaler(), []
    for bad in (False, True, False):
        kfac.optimizer.zero_grad()
        scale.scale(model(torch.ones(1, 2, device=problem.DEVICE)).square().sum()).backward()
        if bad and comm.rank == comm.size - 1:
            model[0].bias.grad *= math.inf
        kfac.step(scale)
        found.append(model[0].weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert comm.allgather(scale.get_scale()) == comm.size * [2.0**9]


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_bfloat16_models_stay_alike(comm, strategy):
    """Oracle: weights of all ranks; the averaged gradient in float32, then rounded."""
    one = trainer(comm, strategy, torch.bfloat16)
    first = problem.state(one.model)
    for number in range(3):
        images, labels = problem.shards(number, comm.size)[comm.rank]
        one.optimizer.zero_grad()
        F.cross_entropy(one.model(images.bfloat16()).float(), labels).backward()
        own = one.model[5].bias.grad.float().cpu()
        one.step()
        state = problem.state(one.model)
        assert all(torch.equal(state, other) for other in comm.allgather(state))
        if strategy == "sgd":
            mean = torch.stack(comm.allgather(own)).double().mean(0).float()
            gradient = inside.gradients(one)["5.bias"].cpu()
            torch.testing.assert_close(gradient, mean, rtol=1e-6, atol=1e-8)
            assert torch.equal(one.model[5].bias.grad.cpu(), gradient.bfloat16())
    assert state.isfinite().all()
    assert not torch.equal(state, first)
    assert {p.dtype for p in one.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("strategy", ALL[1:], ids=problem.label)
def test_ranks_step_alike_in_any_precision(comm, strategy):
    """Oracle: weights of all ranks, to the last bit, near the weights of float32."""
    weights = {}
    for precision in ("float32", "tf32", "bfloat16"):
        model = problem.network().float()
        settings = {**SETTINGS, "damping": 0.1, "matmul_precision": precision}
        kfac = problem.kfac(model, problem.sgd(model), comm, strategy, **settings)
        for number in range(3):
            images, labels = problem.shards(number, comm.size)[comm.rank]
            kfac.optimizer.zero_grad()
            F.cross_entropy(model(images.float()), labels).backward()
            kfac.step()
        weights[precision] = problem.state(model)
        assert all(torch.equal(weights[precision], w) for w in comm.allgather(weights[precision]))
    far = {name: (w - weights["float32"]).norm().item() for name, w in weights.items()}
    assert 0 < far["tf32"] < far["bfloat16"] < 1e-2


@pytest.mark.skipif(RANKS == 1, reason="one rank cannot disagree")
def test_ranks_with_other_precisions_are_refused(comm):
    """Oracle: the line, the same on all ranks."""
    model = problem.network()
    precision = ("tf32", "bfloat16")[comm.rank > 0]
    with pytest.raises(mpikfac.UserError) as caught:
        mpikfac.KFAC(model, problem.sgd(model), comm, matmul_precision=precision)
    assert "ranks disagree on matmul_precision: 'tf32' on rank 0, 'bfloat16' on rank" in str(
        caught.value
    )
    assert "\n" not in str(caught.value) and len(set(comm.allgather(str(caught.value)))) == 1
