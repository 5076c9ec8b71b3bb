"""A trainer in the form of a torch optimizer takes the same steps as the trainer."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.nn.functional as F

from mpikfac import (
    DistributedMuon,
    DistributedNorMuon,
    DistributedShampoo,
    DistributedSOAP,
    FirstOrderTrainer,
    KFACOptimizer,
    MemOpt,
    Optimizer,
    Strategy,
    Transport,
    UserError,
)
from support import problem

STRATEGIES = {
    "comm-opt": Strategy(),
    "owners": Strategy(MemOpt(factor_reduction="reduce_scatter")),
    "owner steps": Strategy(MemOpt(shard_optimizer=True)),
    "late": Strategy(transport=Transport(reduce_factors_at="inverses")),
}


def trainer(comm, kind="kfac", strategy="comm-opt"):
    model = problem.network()
    if kind == "first-order":
        return FirstOrderTrainer(model, problem.sgd(model), comm)
    own = STRATEGIES[strategy]
    return problem.kfac(model, problem.sgd(model), comm, own, **problem.SETTINGS)


def learn(comm, model, optimizer, steps, closure=False):
    """Take steps of `optimizer`, alone or by a closure; return the last loss."""
    for step in steps:
        images, labels = problem.shards(step, comm.size)[comm.rank]

        def passes():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)  # noqa: B023
            loss.backward()
            return loss

        loss = optimizer.step(passes) if closure else (passes(), optimizer.step())[0]
    return loss


def weights(model):
    return torch.cat([one.detach().flatten() for one in model.state_dict().values()])


def stored(state):
    """Return the state as another process reads the state from a file, on the host."""
    file = io.BytesIO()
    on_host = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
    torch.save(on_host, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", ["kfac", "first-order"])
def test_steps_are_the_trainers(comm, kind, closure):
    """Oracle: `trainer.step` with the inner optimizer and its schedule, to the last bit."""
    found, expected = trainer(comm, kind), trainer(comm, kind)
    optimizer, plain = Optimizer(found, max_norm=0.5), expected.optimizer
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)]
    for step in range(4):
        loss = learn(comm, found.model, optimizer, [step], closure)
        images, labels = problem.shards(step, comm.size)[comm.rank]
        plain.zero_grad()
        F.cross_entropy(expected.model(images), labels).backward()
        expected.step(max_norm=0.5)
        for schedule in schedules:
            schedule.step()
    assert loss.item() > 0
    assert plain.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1 / 2**4
    assert torch.equal(weights(found.model), weights(expected.model))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stored_state_goes_on_between_two_decompositions(comm, strategy):
    """Oracle: the uninterrupted run, to the last bit; a file for each rank, model first."""
    first, second = trainer(comm, strategy=strategy), trainer(comm, strategy=strategy)
    optimizer, resumed = Optimizer(first), Optimizer(second)
    learn(comm, first.model, optimizer, range(5))
    state = stored(optimizer.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    resumed.load_state_dict(state)
    for one in (optimizer, resumed):
        learn(comm, one.trainer.model, one, range(5, 8))
    assert torch.equal(weights(first.model), weights(second.model))
    assert not any(name.startswith("model/") for name in state)


def test_the_state_of_rank_0_is_enough_with_comm_opt(comm):
    """Oracle: the uninterrupted run, to the last bit, on all ranks."""
    first, second = trainer(comm), trainer(comm)
    optimizer, resumed = Optimizer(first), Optimizer(second)
    learn(comm, first.model, optimizer, range(5))
    resumed.load_state_dict(stored(comm.bcast(stored(optimizer.state_dict()))))
    second.model.load_state_dict(first.model.state_dict())
    for one in (optimizer, resumed):
        learn(comm, one.trainer.model, one, range(5, 8))
    assert torch.equal(weights(first.model), weights(second.model))


def test_the_share_of_another_rank_is_refused_on_all_ranks(comm):
    """Oracle: the line; the state before."""
    if comm.size == 1:
        return
    one = trainer(comm, strategy="owners")
    optimizer = Optimizer(one)
    learn(comm, one.model, optimizer, range(2))
    before = weights(one.model)
    with pytest.raises(UserError, match="factors/.* is missing; its layer was"):
        optimizer.load_state_dict(comm.bcast(stored(optimizer.state_dict())))
    assert torch.equal(weights(one.model), before)


def test_a_trainers_own_state_changes_nothing(comm):
    """Oracle: a run without; Accelerate loads the state of each optimizer that it is given."""
    found, expected = (Optimizer(trainer(comm)) for _ in range(2))
    for steps in (range(3), range(3, 6)):
        found.load_state_dict(found.state_dict())
        for one in (found, expected):
            learn(comm, one.trainer.model, one, steps)
    assert torch.equal(weights(found.trainer.model), weights(expected.trainer.model))


@pytest.mark.parametrize("strategy", ["comm-opt", "owner steps"])
def test_passes_may_go_through_a_wrapper(comm, strategy):
    """Oracle: passes through the model itself."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            return self.module(*inputs)

    found, expected = (Optimizer(trainer(comm, strategy=strategy)) for _ in range(2))
    learn(comm, Wrapper(found.trainer.model), found, range(3))
    learn(comm, expected.trainer.model, expected, range(3))
    assert torch.equal(weights(found.trainer.model), weights(expected.trainer.model))


@pytest.mark.parametrize("strategy", [None, "mem-opt", Strategy(MemOpt(shard_optimizer=True))])
def test_the_constructor_trains_all_ranks_as_one_process(comm, strategy):
    """Oracle: the same optimizer on a single process, with the batches of all ranks."""
    alone = KFACOptimizer(problem.network(), comm=comm.Split(comm.rank))
    together = KFACOptimizer(problem.network(), strategy=strategy)
    for step in range(problem.STEPS):
        images, labels = problem.batch(step)
        shard = problem.shards(step, comm.size)[comm.rank]
        for optimizer, (x, y) in ((alone, (images, labels)), (together, shard)):
            optimizer.zero_grad()
            F.cross_entropy(optimizer.trainer.model(x), y).backward()
            optimizer.step()
    pairs = zip(together.trainer.model.parameters(), alone.trainer.model.parameters())
    for weights, expected in pairs:
        torch.testing.assert_close(weights, expected, rtol=1e-8, atol=1e-10)


NAMED = {
    **{"muon": DistributedMuon, "normuon": DistributedNorMuon},
    **{"shampoo": DistributedShampoo, "soap": DistributedSOAP},
}


def learn_scaled(comm, optimizer, steps):
    """Take steps with a scaler and a schedule, as a program of one process does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        images, labels = problem.shards(step, comm.size)[comm.rank]
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(optimizer.trainer.model(images), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


@pytest.mark.parametrize("strategy", [None, "comm-opt"])
@pytest.mark.parametrize("preconditioner", NAMED)
def test_a_named_optimizer_is_its_preconditioner_stepped_by_owners(comm, preconditioner, strategy):
    """Oracle: `KFACOptimizer` with the choices by hand, to the last bit, also after a restart."""
    by_name, again = (NAMED[preconditioner](problem.network(), strategy=strategy) for _ in range(2))
    chosen = {"preconditioner": preconditioner, "strategy": strategy or "sharded-optimizer"}
    by_hand = KFACOptimizer(problem.network(), **chosen)
    for optimizer in (by_name, by_hand):
        learn_scaled(comm, optimizer, range(4))
    again.trainer.model.load_state_dict(by_name.trainer.model.state_dict())
    again.load_state_dict(stored(by_name.state_dict()))
    for optimizer in (by_name, by_hand, again):
        learn_scaled(comm, optimizer, range(4, 6))
    expected = weights(by_hand.trainer.model)
    assert torch.equal(weights(by_name.trainer.model), expected)
    assert torch.equal(weights(again.trainer.model), expected)
    assert not torch.equal(expected, weights(problem.network()))
    assert by_name.trainer.plan.strategy.assignment.shard_optimizer == (not strategy)


@pytest.mark.parametrize("preconditioner", NAMED)
def test_a_named_optimizer_trains_all_ranks_as_one_process(comm, preconditioner):
    """Oracle: the same optimizer on a single process, with the batches of all ranks."""
    alone = NAMED[preconditioner](problem.network(), comm=comm.Split(comm.rank))
    together = NAMED[preconditioner](problem.network())
    for step in range(problem.STEPS):
        shard = problem.shards(step, comm.size)[comm.rank]
        for optimizer, (images, labels) in ((alone, problem.batch(step)), (together, shard)):
            optimizer.zero_grad()
            F.cross_entropy(optimizer.trainer.model(images), labels).backward()
            optimizer.step()
    found, expected = (weights(one.trainer.model) for one in (together, alone))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_state_of_rank_0_alone_is_refused_where_owners_step(comm):
    """Oracle: the line names the remedy; the state before."""
    if comm.size == 1:
        return
    optimizer = DistributedMuon(problem.network())
    learn(comm, optimizer.trainer.model, optimizer, range(2))
    before = weights(optimizer.trainer.model)
    line = "is missing; .* load each rank's own file, or use save_checkpoint"
    with pytest.raises(UserError, match=line):
        optimizer.load_state_dict(comm.bcast(stored(optimizer.state_dict())))
    assert torch.equal(weights(optimizer.trainer.model), before)


def test_a_scaler_on_one_rank_lets_all_ranks_skip(comm):
    """Oracle: the weights before; each rank's scaler follows the rank's own gradients."""
    optimizer = KFACOptimizer(problem.network())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in optimizer.trainer.model.parameters()]
    broken = comm.rank == comm.size - 1
    images, labels = problem.shards(0, comm.size)[comm.rank]
    loss = F.cross_entropy(optimizer.trainer.model(images), labels)
    scaler.scale(loss * (math.inf if broken else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if broken else 8.0)
    for parameter, old in zip(optimizer.trainer.model.parameters(), before):
        assert torch.equal(parameter, old)


def test_ranks_have_the_same_bound(comm):
    """Oracle: the line on all ranks, before any step."""
    if comm.size == 1:
        return
    one = trainer(comm, strategy="owner steps")
    last = comm.rank == comm.size - 1
    with pytest.raises(UserError, match="ranks disagree on max_norm: None on rank 0, 1.0 on rank"):
        Optimizer(one, max_norm=1.0 if last else None)
