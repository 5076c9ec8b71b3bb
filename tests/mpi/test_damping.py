"""Damping and step length are the same for every distribution."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import LevenbergMarquardt, MemOpt, SGDGrafting, Strategy
from support import inside, oracles, problem

RANKS = mpikfac.world().size
EXACT = problem.strategies(RANKS, ("allreduce", "reduce_scatter"))


def trainer(comm, strategy, **settings):
    model = problem.network()
    choices = problem.SETTINGS | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy, **choices)


@functools.cache
def textbook(**settings):
    """Return the model after training in one process on joined batches, and the clip's factors."""
    model = problem.network()
    steps = [problem.shards(step, RANKS) for step in range(problem.STEPS)]
    scales = oracles.train(model, problem.sgd(model), steps, **problem.SETTINGS | settings)
    return problem.state(model), scales


def refused(strategy, preconditioner):
    """Return whether the preconditioner's plan needs different owners."""
    return (
        preconditioner == "inverse"
        and not strategy.assignment.colocate_factors
        and strategy.assignment.factor_reduction == "reduce_scatter"
    )


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
@pytest.mark.parametrize("strategy", EXACT, ids=problem.label)
def test_relative_damping_is_the_textbooks(comm, strategy, preconditioner):
    """Oracle: K-FAC by im2col and dense solves on the joined batch."""
    if not refused(strategy, preconditioner):
        choices = {"preconditioner": preconditioner, "relative_damping": True}
        found = problem.run(trainer(comm, strategy, **choices), comm)
        torch.testing.assert_close(found, textbook(**choices)[0], rtol=0, atol=1e-10)


LENGTHS = {
    "graft": {"grafting": SGDGrafting(), "kl_clip": None},
    "graft, then the KL clip": {"grafting": SGDGrafting(), "kl_clip": 0.001},
    "norm": {"kl_clip": None, "norm_clip": 0.1},
    "Fisher norm": {"kl_clip": None, "fisher_clip": 0.1},
    "graft, then norm": {"grafting": SGDGrafting(), "kl_clip": None, "norm_clip": 0.1},
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("strategy", EXACT, ids=problem.label)
def test_the_length_of_a_step_is_the_textbooks(comm, strategy, lengths):
    """Oracle: dense solves, norms and factors of the bounds in a process; the plan's bytes."""
    expected, scales = textbook(**lengths)
    kfac = trainer(comm, strategy, **lengths)
    for step in range(problem.STEPS):
        kfac.trace.clear()
        found = problem.run(kfac, comm, [step])
        assert kfac.kl_scale.item() == pytest.approx(scales[step])
        planned = problem.planned(kfac, step)
        if not inside.settings(kfac).bound:
            planned.pop("clip", None)
        assert +collections.Counter(kfac.trace.sent) == planned
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    # else the bound would not be tested
    assert bool(inside.settings(kfac).bound) == (max(scales) < 1)
    assert all(torch.equal(found, other) for other in comm.allgather(found))


def adaptive(comm, strategy, **settings):
    """Return K-FAC with a damping that follows every step, from a start value that has to fall."""
    damping = LevenbergMarquardt(0.3, damping_adaptation_interval=1, damping_adaptation_decay=0.8)
    return trainer(comm, strategy, **{"damping": damping, "inv_update_steps": 2, **settings})


def run_adaptive(comm, kfac, steps):
    """Train; return the model's state, and the ratios and dampings of all steps."""
    seen = []
    for step in steps:
        images, labels = problem.shards(step, comm.size)[comm.rank]
        kfac.optimizer.zero_grad()
        loss = F.cross_entropy(kfac.model(images), labels)
        loss.backward()
        kfac.step()
        with torch.no_grad():
            after = F.cross_entropy(kfac.model(images), labels)
        ratio = kfac.update_damping(loss.item(), after.item())
        seen.append((ratio, inside.damping(kfac, kfac.steps)))
    return problem.state(kfac.model), seen


@problem.by_one_process
def adapted_alone(own, preconditioner, steps):
    """Return the results of `run_adaptive` in one process on the joined batches."""
    return run_adaptive(own, adaptive(own, None, preconditioner=preconditioner), steps)


def assert_same_run(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    numbers = [[number for row in seen for number in row] for _, seen in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-7)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("strategy", EXACT, ids=problem.label)
def test_adapted_damping_is_one_processs_and_the_same_on_all_ranks(comm, strategy, preconditioner):
    """Oracle: a single process on the joined batches; among ranks, to the last bit."""
    if refused(strategy, preconditioner):
        return
    steps = range(6)
    found = run_adaptive(comm, adaptive(comm, strategy, preconditioner=preconditioner), steps)
    assert_same_run(found, adapted_alone(preconditioner, steps))
    assert len(set(map(str, comm.allgather(found[1])))) == 1
    assert len({damping for _, damping in found[1]}) > 1


@pytest.mark.parametrize("fewer", range(1, RANKS + 1))
def test_adapted_damping_survives_a_restart_on_other_ranks(comm, fewer):
    """Oracle: the uninterrupted run; the resumed run starts with a different damping."""
    strategy = Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
    kfac = adaptive(comm, strategy)
    run_adaptive(comm, kfac, range(3))
    state = problem.whole_state(kfac, comm)
    expected = run_adaptive(comm, kfac, range(3, 6))
    team = comm.Split(comm.rank < fewer, comm.rank)
    if comm.rank < fewer:
        other = adaptive(
            team,
            strategy,
            damping=LevenbergMarquardt(
                0.001, damping_adaptation_interval=1, damping_adaptation_decay=0.8
            ),
        )
        other.load_state_dict(state)
        assert_same_run(run_adaptive(team, other, range(3, 6)), expected)


@pytest.mark.skipif(RANKS == 1, reason="one rank cannot disagree")
def test_ranks_that_adapt_otherwise_are_refused(comm):
    damping = LevenbergMarquardt(0.3, damping_adaptation_interval=1 + comm.rank)
    with pytest.raises(mpikfac.UserError, match="ranks disagree on adapted: LevenbergMarquardt"):
        adaptive(comm, None, damping=damping)
