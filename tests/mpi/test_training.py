"""Training on N ranks matches training on the joined batch, for every distribution."""

from __future__ import annotations

import collections
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import CommOpt, HybridOpt, MemOpt, Refresh, Strategy
from support import inside, oracles, problem

RANKS = mpikfac.world().size
WORKERS = mpikfac.plan.divisors(RANKS)
EXACT = problem.strategies(RANKS, ("allreduce", "reduce_scatter"))


def trainer(comm, strategy, optimizer=problem.sgd, **settings):
    model = problem.network()
    return problem.kfac(model, optimizer(model), comm, strategy, **problem.SETTINGS | settings)


@functools.cache
def textbook(optimizer=problem.sgd, sources=None, **settings):
    """Return the model after training in a process on joined batches, and the clip's factors."""
    model = problem.network()
    steps = [problem.shards(step, RANKS) for step in range(problem.STEPS)]
    choices = problem.SETTINGS | settings | {"sources": dict(sources) if sources else None}
    scales = oracles.train(model, optimizer(model), steps, **choices)
    return problem.state(model), scales


def bits(tensor):
    return tensor.contiguous().numpy().tobytes()


def run_as_planned(comm, kfac):
    """Train; check that every step sends the plan's bytes, stage by stage."""
    for step in range(problem.STEPS):
        kfac.trace.clear()
        problem.run(kfac, comm, [step])
        planned = collections.Counter()
        kind = step % 2 == 0, step % 3 == 0, bool(inside.settings(kfac).bound)
        for message in kfac.plan.messages(comm.rank, *kind):
            planned[message.stage] += message.bytes
        assert dict(kfac.trace.sent) == dict(planned)
    return problem.state(kfac.model)


def assert_trained(comm, trainer, found, expected):
    """Check that all ranks end with the same bits, and with the expected numbers to rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert len(set(comm.allgather(bits(found)))) == 1
    assert trainer.steps == problem.STEPS


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT, "eva"])
@pytest.mark.parametrize("strategy", EXACT, ids=problem.label)
def test_every_strategy_trains_as_one_process_does(comm, strategy, preconditioner):
    """Oracle: K-FAC by im2col and dense solves on the joined batch; the plan's messages."""
    if (
        preconditioner == "inverse"
        and not strategy.assignment.colocate_factors
        and strategy.assignment.factor_reduction == "reduce_scatter"
    ):
        with pytest.raises(ValueError, match="needs assignment.colocate_factors=True"):
            trainer(comm, strategy, preconditioner=preconditioner)
        return
    expected, scales = textbook(preconditioner=preconditioner)
    kfac = trainer(comm, strategy, preconditioner=preconditioner)
    assert_trained(comm, kfac, run_as_planned(comm, kfac), expected)
    assert kfac.kl_scale.item() == pytest.approx(scales[-1])
    assert max(scales) < 1  # else the clip would not be tested


@problem.by_one_process
def delayed(own, steps):
    """Return the model after steps of a single process that decomposes two steps ahead."""
    return problem.run(trainer(own, Strategy(MemOpt(), refresh=Refresh(staleness=2))), own, steps)


@pytest.mark.parametrize("strategy", EXACT, ids=problem.label)
def test_delayed_decompositions_are_the_same_for_every_strategy(comm, strategy):
    """Oracle: a single process with the same steps; steps with and without old decompositions."""
    steps = range(6)
    found = problem.run(trainer(comm, replace(strategy, refresh=Refresh(staleness=2))), comm, steps)
    torch.testing.assert_close(found, delayed(steps), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("workers", WORKERS)
def test_unclipped_steps(comm, workers, shards):
    """Oracle: as above; without the clip's message."""
    choices = {"kl_clip": None, "damping": 1.0}
    kfac = trainer(
        comm,
        Strategy(HybridOpt(grad_workers=workers, shard_optimizer=shards)),
        **choices,
    )
    assert_trained(comm, kfac, run_as_planned(comm, kfac), textbook(**choices)[0])


@pytest.mark.parametrize("preconditioner", ["eigen", "eva"])
@pytest.mark.parametrize("strategy", problem.strategies(RANKS, ["local"]), ids=problem.label)
def test_owners_may_use_their_own_batch_only(comm, strategy, preconditioner):
    """Oracle: K-FAC in one process, every factor from the owner's shard [DP-KFAC]."""
    start = (
        "identity"
        if strategy.assignment.colocate_factors and preconditioner == "eigen"
        else "first"
    )
    kfac = trainer(comm, strategy, initial_factor=start, preconditioner=preconditioner)
    sources = tuple(kfac.plan.owners.items())
    expected, _ = textbook(sources=sources, initial_factor=start, preconditioner=preconditioner)
    assert_trained(comm, kfac, run_as_planned(comm, kfac), expected)


@pytest.mark.parametrize("reduction", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize("workers", WORKERS)
def test_adam_on_owners_keeps_state_of_what_it_steps_only(comm, workers, reduction):
    """Oracle: Adam after K-FAC in one process; the plan's updaters."""
    kfac = trainer(
        comm,
        Strategy(HybridOpt(grad_workers=workers, factor_reduction=reduction, shard_optimizer=True)),
        problem.adam,
    )
    assert_trained(comm, kfac, problem.run(kfac, comm), textbook(problem.adam)[0])
    named = list(kfac.model.named_parameters())
    stepped = {name for name, parameter in named if parameter in kfac.optimizer.state}
    updaters = kfac.plan.updaters
    block = {name: name if name in updaters else name.rpartition(".")[0] for name, _ in named}
    assert stepped == {name for name, _ in named if updaters[block[name]] == comm.rank}
    saved = [n for n in kfac.state_dict() if n.startswith("optimizer/state/")]
    assert {name.split("/")[2] for name in saved} == stepped


@pytest.mark.parametrize("preconditioner", ["eigen", problem.UNSPLIT, "eva"])
def test_strategies_that_reduce_everywhere_agree_bit_for_bit(comm, preconditioner):
    """Oracle: the strategies, compared in pairs."""
    placements = [(w, b, c) for w in WORKERS for b, c in (("compute", False), ("memory", True))]
    strategies = [
        Strategy(HybridOpt(grad_workers=w, assignment_strategy=b, colocate_factors=c))
        for w, b, c in [*placements, (1, "compute", True)]
    ]
    runs = [problem.run(trainer(comm, s, preconditioner=preconditioner), comm) for s in strategies]
    assert len({bits(run) for run in runs}) == 1


def test_comm_opt_is_the_default(comm):
    """Oracle: the strategy by name."""
    assert trainer(comm, None).plan == trainer(comm, Strategy(CommOpt())).plan


@pytest.mark.parametrize("workers", WORKERS)
def test_averaging_and_stepping_oneself_is_a_step(comm, workers):
    """Oracle: K-FAC in one process; the caller averages gradients tensor by tensor."""
    kfac = trainer(comm, Strategy(HybridOpt(grad_workers=workers)))
    for step in range(problem.STEPS):
        images, labels = problem.shards(step, comm.size)[comm.rank]
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(images), labels).backward()
        for parameter in kfac.model.parameters():
            parameter.grad = sum(comm.allgather(parameter.grad)) / comm.size
        kfac.precondition()
        kfac.optimizer.step()
    assert_trained(comm, kfac, problem.state(kfac.model), textbook()[0])


@pytest.mark.parametrize("shards", [False, True])
def test_skipped_layers_and_gradient_accumulation(comm, shards):
    """Oracle: a single process that skips the layer too, with the joined batch in one pass."""

    def run(team, strategy, micro_batch):
        kfac = trainer(team, strategy, skip=["3"])
        for step in range(problem.STEPS):
            images, labels = problem.shards(step, team.size)[team.rank]
            kfac.optimizer.zero_grad()
            for x, y in zip(images.split(micro_batch), labels.split(micro_batch)):
                loss = F.cross_entropy(kfac.model(x), y, reduction="sum") / len(images)
                loss.backward()
            kfac.step()
        return problem.state(kfac.model)

    expected = run(comm.Split(comm.rank), None, problem.EXAMPLES)
    found = run(
        comm,
        Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=shards)),
        1,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", [problem.sgd, problem.adam])
def test_data_parallel_training_is_plain_training(comm, optimizer):
    """Oracle: plain torch on the joined batch."""
    model = problem.network()
    plain = optimizer(model)
    for step in range(problem.STEPS):
        plain.zero_grad()
        images, labels = problem.batch(step)
        F.cross_entropy(model(images), labels).backward()
        plain.step()
    copy = problem.network()
    baseline = mpikfac.FirstOrderTrainer(copy, optimizer(copy), comm)
    assert_trained(comm, baseline, problem.run(baseline, comm), problem.state(model))


def with_batchnorm():
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 5)).double()


@pytest.mark.parametrize("shards", ["first-order", False, True])
def test_batchnorm_statistics_become_the_mean_of_all_ranks(comm, shards):
    """Oracle: the mean over ranks of a layer copy's statistics after the rank's own shard."""
    model = with_batchnorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if shards == "first-order":
        trainer = mpikfac.FirstOrderTrainer(model, optimizer, comm)
    else:
        trainer = mpikfac.KFAC(
            model,
            optimizer,
            comm,
            Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=shards)),
        )
    for step in range(3):
        alone = with_batchnorm()
        alone.load_state_dict(model.state_dict())
        alone(problem.shards(step, comm.size)[comm.rank][0])
        problem.run(trainer, comm, [step])
        for name in ("running_mean", "running_var"):
            expected = sum(comm.allgather(getattr(alone[1], name))) / comm.size
            torch.testing.assert_close(getattr(model[1], name), expected, rtol=1e-12, atol=1e-12)
        assert len(set(comm.allgather(bits(problem.state(model))))) == 1
        assert model[1].num_batches_tracked == step + 1


@pytest.mark.parametrize("make", [mpikfac.FirstOrderTrainer, mpikfac.KFAC])
def test_the_model_becomes_rank_0s(comm, make):
    """Oracle: rank 0's model, integers, empty and oddly laid out tensors included."""
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2))
    model.to(memory_format=torch.channels_last)
    model.register_buffer("counts", torch.arange(3) + comm.rank)
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("flag", torch.tensor(comm.rank == 0))
    model[1].num_batches_tracked.fill_(comm.rank)
    first = comm.bcast(model.state_dict())
    make(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name]), name
