"""The quadratic model's step length and momentum are the same for every distribution."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, LevenbergMarquardt, MemOpt, Refresh, Strategy, Transport
from mpikfac.lab import QuadraticModel
from support import inside, problem

pytestmark = pytest.mark.lab

RANKS = mpikfac.world().size
EVERYONE = problem.strategies(RANKS, ("allreduce", "reduce_scatter"))
EVERYONE = [strategy for strategy in EVERYONE if not strategy.assignment.shard_optimizer]
EVERYONE += [
    Strategy(CommOpt(), transport=Transport(overlap=True)),
    Strategy(MemOpt(), refresh=Refresh(staleness=1, stagger=2)),
]
STEPS = range(5)
STOP = 3


def trainer(comm, strategy, preconditioner="eigen"):
    model = problem.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {
        "damping": LevenbergMarquardt(
            0.3, damping_adaptation_interval=1, damping_adaptation_decay=0.8
        ),
        "inv_update_steps": 2,
    }
    settings |= {"kl_clip": None, "grafting": QuadraticModel(), "preconditioner": preconditioner}
    return problem.kfac(model, optimizer, comm, strategy, **problem.SETTINGS | settings)


def train(kfac, comm, steps=STEPS, cut=None):
    """Train on shards, cut at the given places; return state, dampings and predictions.

    Args:
        cut: returns the rank's examples; shards of the same size if None.
    """
    numbers = []
    for step in steps:
        images, labels = problem.batch(step) if cut else problem.shards(step, comm.size)[comm.rank]
        if cut:
            images, labels = images[cut], labels[cut]
        loss = functools.partial(F.cross_entropy, target=labels)
        kfac.optimizer.zero_grad()
        before = loss(kfac.model(images))
        before.backward()
        kfac.grafting.set_batch(images, loss)
        kfac.step(examples=len(images) if cut else None)
        numbers.append(inside.predicted_change(kfac).item())
        with torch.no_grad():
            after = loss(kfac.model(images))
        if not cut:
            kfac.update_damping(before.item(), after.item())
            numbers.append(inside.damping(kfac, kfac.steps))
    return problem.state(kfac.model), numbers


@problem.by_one_process
def alone(own, stagger, preconditioner, cut):
    """Return the results of a single process on the joined batches."""
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=stagger - 1, stagger=stagger))
    return train(trainer(own, strategy, preconditioner), own, cut=slice(None) if cut else None)


def assert_same(comm, found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(one), torch.as_tensor(other), rtol=1e-9, atol=1e-9
        )
    assert all(torch.equal(found[0], other) for other in comm.allgather(found[0]))


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", EVERYONE, ids=problem.label)
def test_steps_are_one_processs(comm, strategy, preconditioner):
    """Oracle: a single process on the joined batches; among ranks, to the last bit."""
    if (
        preconditioner == "inverse"
        and not strategy.assignment.colocate_factors
        and strategy.assignment.factor_reduction == "reduce_scatter"
    ):
        return  # the plan needs different owners
    found = train(trainer(comm, strategy, preconditioner), comm)
    assert_same(comm, found, alone(strategy.refresh.stagger, preconditioner, False))
    assert len(set(found[1][1::2])) > 1  # the damping


def test_ranks_weigh_by_their_examples(comm):
    """Oracle: a single process on the joined batches; the last rank may have no example."""
    ends = [5, 11, 12, 12]
    mine = slice(([0, *ends])[comm.rank], ends[comm.rank] if comm.rank + 1 < RANKS else 12)
    found = train(trainer(comm, None), comm, cut=mine)
    assert_same(comm, found, alone(1, "eigen", True))


@pytest.mark.parametrize("fewer", range(1, RANKS + 1))
def test_the_last_step_survives_a_restart_on_other_ranks(comm, fewer):
    """Oracle: the uninterrupted run; without the last step, the end differs."""
    kfac = trainer(comm, Strategy(MemOpt(factor_reduction="reduce_scatter")))
    train(kfac, comm, range(STOP))
    state = problem.whole_state(kfac, comm)
    assert not kfac.missing(state)
    expected = train(kfac, comm, range(STOP, 6))
    less = {name: value for name, value in state.items() if "momentum" not in name}
    team = comm.Split(comm.rank < fewer, comm.rank)
    if comm.rank < fewer:
        found = []
        for known in state, less:
            other = trainer(team, None)
            other.load_state_dict(known)
            found.append(train(other, team, range(STOP, 6)))
        assert_same(team, found[0], expected)
        assert (found[1][0] - expected[0]).abs().max() > 1e-4
