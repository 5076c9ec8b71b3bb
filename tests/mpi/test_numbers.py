"""Non-finite values: all ranks leave out the affected parts, and training continues."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import MemOpt, Refresh, Strategy, UserError, numerics
from support import inside, problem

RANKS = mpikfac.world().size
ALL = problem.strategies(RANKS)
BAD = itertools.cycle([math.nan, math.inf, -math.inf])


def trainer(comm, strategy=None, **settings):
    model = problem.network()
    return problem.kfac(model, problem.sgd(model), comm, strategy, **problem.SETTINGS | settings)


def backward(trainer, comm, step, spoil=None):
    """Run the passes of a step, in which `spoil` may change this rank's images."""
    images, labels = problem.shards(step, comm.size)[comm.rank]
    trainer.optimizer.zero_grad()
    F.cross_entropy(trainer.model(spoil(images) if spoil else images), labels).backward()


def total(comm, trainer, kind):
    return comm.allreduce(trainer.nonfinite.counts[kind])


def assert_alike(comm, trainer):
    """Check that all ranks hold the same finite model; return the model's bits."""
    state = problem.state(trainer.model)
    assert state.isfinite().all()
    assert all(torch.equal(state, other) for other in comm.allgather(state))
    return state


def state_and_momentum(trainer):
    buffers = [s["momentum_buffer"].flatten().cpu() for s in trainer.optimizer.state.values()]
    return torch.cat([problem.state(trainer.model), *buffers])


@pytest.mark.parametrize(("strategy", "bad"), list(zip(ALL, BAD)), ids=problem.label)
def test_a_batch_that_is_not_finite_on_one_rank_changes_nothing(comm, strategy, bad):
    """Oracle: weights, momentum and averages before; a count for every layer and both factors."""
    kfac = trainer(comm, strategy)
    problem.run(kfac, comm, [0, 1])
    before = state_and_momentum(kfac), inside.factors(kfac).flat.clone()
    spoil = (lambda images: images * bad) if comm.rank == comm.size - 1 else None
    backward(kfac, comm, 2, spoil)
    kfac.step()
    if strategy.assignment.factor_reduction != "local":  # else factors are of different data
        assert torch.equal(inside.factors(kfac).flat, before[1])
        assert total(comm, kfac, "statistics") == 6
    assert torch.equal(state_and_momentum(kfac), before[0])
    assert total(comm, kfac, "gradient") == 5  # 3 layers, scale and shift of the norm
    problem.run(kfac, comm, [3])
    assert not torch.equal(assert_alike(comm, kfac), before[0][: len(problem.state(kfac.model))])


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_a_layer_whose_gradient_is_not_finite_stays_while_the_others_move(comm, strategy):
    """Oracle: by hand: the changed weights, with the KL clip over the remaining layers."""
    kfac = trainer(comm, strategy)
    problem.run(kfac, comm, [0])
    weights = {name: kfac.model[int(name)].weight for name in ("0", "3", "5")}
    bad = math.nan if comm.rank == comm.size - 1 else 1.0
    hook = weights["3"].register_hook(lambda gradient: gradient * bad)
    for moving in ({"0", "5"}, {"0", "3", "5"}):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        problem.run(kfac, comm, [kfac.steps])
        assert_alike(comm, kfac)
        assert {n for n, w in weights.items() if not torch.equal(before[n], w)} == moving
        hook.remove()


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_factors_that_are_not_finite_at_first_are_the_identity(comm, strategy):
    """Oracle: the identity's triangle, and the statistics of the remaining factors."""
    kfac = trainer(comm, strategy)
    backward(kfac, comm, 0)
    if "0.A" in inside.statistics(kfac):
        inside.statistics(kfac)["0.A"][0, 0] = math.nan
    kfac.step()
    if "0.A" in inside.factors(kfac):
        identity = torch.eye(kfac.plan.factors["0.A"].order, dtype=torch.float64)
        torch.testing.assert_close(
            mpikfac.numerics.unfold_triangle(inside.factors(kfac)["0.A"]), identity
        )
    assert total(comm, kfac, "statistics") == 1
    assert_alike(comm, kfac)


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_vectors_that_are_not_finite_at_first_are_0(comm, strategy):
    """Oracle: 0, and hence the gradient divided by the damping."""
    kfac = trainer(comm, strategy, preconditioner="eva", damping=0.5, kl_clip=None)
    backward(kfac, comm, 0)
    if "0.A" in inside.statistics(kfac):
        inside.statistics(kfac)["0.A"][0] = math.nan
    kfac.step()
    if "0.A" in inside.factors(kfac):
        assert not inside.factors(kfac)["0.A"].any()
    preconditioned = {layer.name for layer in kfac.plan.of(comm.rank).preconditioned}
    if not strategy.assignment.shard_optimizer and "0" in preconditioned:
        expected = inside.gradients(kfac)["0"] / 0.5
        torch.testing.assert_close(inside.directions(kfac)["0"], expected)
    assert total(comm, kfac, "statistics") == 1
    assert_alike(comm, kfac)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", problem.strategies(RANKS, ["allreduce"]), ids=problem.label)
def test_a_failed_decomposition_leaves_the_one_before(comm, strategy, preconditioner, monkeypatch):
    """Oracle: the bases before; layers whose decompositions work get new ones."""
    kfac = trainer(
        comm, strategy, preconditioner=preconditioner, inv_update_steps=1, factor_update_steps=1
    )
    problem.run(kfac, comm, [0])
    before = {name: block.clone() for name, block in inside.bases(kfac).items()}
    fail_at(monkeypatch, order=kfac.plan.factors["3.A"].order)
    problem.run(kfac, comm, [1])
    for name, block in inside.bases(kfac).items():
        assert torch.equal(block, before[name]) == name.startswith("3.A"), name
    assert total(comm, kfac, "decomposition") == 1
    assert_alike(comm, kfac)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", problem.strategies(RANKS, ["allreduce"]), ids=problem.label)
def test_a_layer_without_any_decomposition_takes_its_gradient(
    comm, strategy, preconditioner, monkeypatch
):
    """Oracle: the layer's averaged gradient, times the step's KL clip factor."""
    fail_at(monkeypatch, order=82)  # 3.A: 9 channels of 3 x 3, and the bias
    kfac = trainer(comm, strategy, preconditioner=preconditioner)
    backward(kfac, comm, 0)
    kfac.step()
    if "3" in inside.directions(kfac):
        gradient = inside.gradients(kfac)["3"]
        if not strategy.assignment.shard_optimizer:
            assert torch.equal(inside.directions(kfac)["3"], gradient * kfac.kl_scale)
    assert total(comm, kfac, "decomposition") == 1
    assert_alike(comm, kfac)


def fail_at(monkeypatch, order):
    """Let every decomposition of factors of the given order fail."""

    def failing(function):
        def decomposed(factor, *rest):
            if factor.shape[-1] == order:  # one factor, or a stack
                raise ArithmeticError("on purpose")
            return function(factor, *rest)

        return decomposed

    for name in ("eigenbasis", "damped_inverse"):
        monkeypatch.setattr(numerics, name, failing(getattr(numerics, name)))


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("works", [(torch.float64, 0.0), (torch.float64, 0.05)])
def test_a_decomposition_is_tried_in_float64_and_with_more_damping(
    comm, preconditioner, works, monkeypatch
):
    """Oracle: nothing is counted if a later attempt works; damping as documented."""
    seen = []
    for name in ("eigenbasis", "damped_inverse"):
        function = getattr(numerics, name)

        def picky(factor, *damping, function=function):
            seen.append((factor.dtype, *map(float, damping)))
            least = works[1] if damping else 0.0
            if factor.dtype != works[0] or (damping and float(damping[0]) < least):
                raise ArithmeticError("on purpose")
            return function(factor, *damping)

        monkeypatch.setattr(numerics, name, picky)
    model = problem.network().float()
    settings = problem.SETTINGS | {"preconditioner": preconditioner}
    kfac = problem.kfac(model, problem.sgd(model), comm, **settings)
    images, labels = problem.shards(0, comm.size)[comm.rank]
    F.cross_entropy(model(images.float()), labels).backward()
    kfac.step()
    assert {dtype for dtype, *_ in seen} <= {torch.float32, torch.float64}
    assert total(comm, kfac, "decomposition") == 0 or (preconditioner, works[1]) == (
        "inverse",
        0.05,
    )
    assert_alike(comm, kfac)


@pytest.mark.parametrize("shards", [False, True])
def test_too_many_in_a_row_end_the_run(comm, shards):
    """Oracle: the first step with more failures than tolerated; layer and rank are named."""
    alone = comm.Split(comm.rank)  # the layer's owner raises and ends the job
    kfac = trainer(alone, Strategy(MemOpt(shard_optimizer=shards)))
    problem.run(kfac, alone, [0])
    for _ in range(inside.TOLERATED):
        backward(kfac, alone, 0, lambda images: images * math.nan)
        kfac.step()
    backward(kfac, alone, 0, lambda images: images * math.nan)
    text = rf"rank 0, step {inside.TOLERATED + 1}: .* in the \w+ of '0"
    with pytest.raises(UserError, match=text):
        kfac.step()


def test_too_many_in_a_row_of_a_layers_turns_end_the_run(comm, monkeypatch):
    """Oracle: the first decomposition and the first turns of the share, with refreshes between.

    With two shares a factor's turn comes every sixth step, at 3 and 9 and so on.
    """
    alone = comm.Split(comm.rank)
    kfac = trainer(alone, Strategy(MemOpt(), refresh=Refresh(stagger=2)), inv_update_steps=6)
    fail_at(monkeypatch, order=kfac.plan.factors["0.A"].order)
    assert kfac.plan.turns_of["0"] == 1
    last = 3 + 6 * (inside.TOLERATED - 1)
    problem.run(kfac, alone, range(last))
    assert kfac.nonfinite.counts["decomposition"] == inside.TOLERATED
    with pytest.raises(UserError, match=rf"rank 0, step {last}: .* in the decomposition of '0.A'"):
        problem.run(kfac, alone, [last])


def test_running_statistics_are_taken_back(comm):
    """Oracle: mean and variance before a batch that is not finite on one rank."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), 0.1), comm)
    for spoiled in (False, True):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        generator = torch.Generator().manual_seed(comm.rank)
        images = torch.randn(6, 3, generator=generator, device="cpu").to(problem.DEVICE)
        kfac.optimizer.zero_grad()
        bad = math.nan if spoiled and comm.rank == 0 else 1.0
        model(images * bad).square().mean().backward()
        kfac.step()
        changed = {n for n, b in model.named_buffers() if not torch.equal(b, before[n])}
        assert ("1.running_mean" in changed) != spoiled
    assert_alike(comm, kfac)


def test_votes_come_back_as_their_mean(comm):
    """Oracle: the sum over ranks of the written votes, for every way to update."""
    for strategy in ALL:
        kfac = trainer(comm, strategy)
        for step in range(2):
            kfac.votes[3] = comm.rank + step
            problem.run(kfac, comm, [step])
            expected = sum(range(comm.size)) / comm.size + step
            assert kfac.votes[3].item() == pytest.approx(expected)
            assert torch.equal(kfac.votes, comm.bcast(kfac.votes))


def test_a_few_bad_batches_cost_little(comm):
    """Oracle: the loss of the same 200 steps without bad batches, to 1 %."""
    losses = []
    for bad_steps in ((), (0, 7, 8, 50, 111)):
        kfac = trainer(comm, damping=0.1, kl_clip=None, factor_update_steps=1)
        for group in kfac.optimizer.param_groups:
            group |= {"lr": 0.02, "weight_decay": 0.03}  # so that the loss converges
        for step in range(200):
            bad = step in bad_steps and comm.rank == step % comm.size
            backward(kfac, comm, step % 4, (lambda images: images * math.nan) if bad else None)
            kfac.step()
        model = kfac.model
        with torch.no_grad():
            parts = [F.cross_entropy(model(x), y).item() for x, y in map(problem.batch, range(4))]
        losses.append(sum(parts))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
