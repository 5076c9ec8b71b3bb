"""A run may stop and go on with other ranks and another strategy."""

from __future__ import annotations

import problem
import pytest
import torch

import mpikfac
from mpikfac import Strategy

RANKS = mpikfac.world().size
STOP = 2  # between two decompositions
ALL = problem.strategies(RANKS)
EXACT = problem.strategies(RANKS, ("everyone", "owners"))


def trainer(comm, strategy=None, optimizer=problem.sgd, **settings):
    model = problem.network()
    return mpikfac.KFAC(model, optimizer(model), comm, strategy, **problem.SETTINGS | settings)


def whole_state(comm, trainer):
    """All ranks' shares as one; what several ranks hold is equal on all of them."""
    whole = {}
    for part in comm.allgather(trainer.state_dict()):
        for name, value in part.items():
            held = whole.setdefault(name, value)
            assert type(held) is type(value), name
            same = torch.equal(held, value) if torch.is_tensor(value) else held == value
            assert same, name
    return whole


def interrupted(comm, strategy, optimizer=problem.sgd, **settings):
    """A run's state at STOP, and where it ends if it goes on."""
    kfac = trainer(comm, strategy, optimizer, **settings)
    problem.run(kfac, comm, range(STOP))
    state = whole_state(comm, kfac)
    return state, problem.run(kfac, comm, range(STOP, problem.STEPS))


def continued(comm, state, strategy, optimizer=problem.sgd, **settings):
    kfac = trainer(comm, strategy, optimizer, **settings)
    kfac.load_state_dict(state)
    return problem.run(kfac, comm, range(STOP, problem.STEPS))


@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_the_same_strategy_goes_on_to_the_last_bit(comm, strategy):
    """Oracle: the uninterrupted run."""
    optimizer = problem.sgd if strategy.colocate else problem.adam
    state, expected = interrupted(comm, strategy, optimizer)
    assert torch.equal(continued(comm, state, strategy, optimizer), expected)
    factors = {name for name in state if name.startswith("kfac/factors/")}
    assert factors == {f"kfac/factors/{layer}.{kind}" for layer in (0, 3, 5) for kind in "AG"}


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_any_strategy_goes_on_with_anothers_state(comm, solver):
    """Oracle: the uninterrupted run, but for rounding. Each hands over to the next."""
    strategies = [s for s in EXACT if s.colocate]
    for before, after in zip(strategies, [*strategies[1:], strategies[0]]):
        state, expected = interrupted(comm, before, solver=solver)
        found = continued(comm, state, after, solver=solver)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fewer", range(1, RANKS))
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(Strategy(1, "owners", "owner"), problem.adam), (Strategy(1), problem.sgd)],
    ids=["owners", "everyone"],
)
def test_other_numbers_of_ranks_go_on(comm, fewer, strategy, optimizer):
    """Oracle: the uninterrupted run, on all ranks and on fewer, but for rounding."""
    team = comm.Split(comm.rank < fewer, comm.rank)
    state, expected = interrupted(comm, strategy, optimizer)
    if comm.rank < fewer:
        found = continued(team, state, strategy, optimizer)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        state, expected = interrupted(team, strategy, optimizer)
    state, expected = comm.bcast((state, expected))
    found = continued(comm, state, strategy, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_first_order_runs_state_starts_kfac(comm):
    """Oracle: one process that does the same."""

    def run(team):
        model = problem.network()
        baseline = mpikfac.DataParallel(model, problem.sgd(model), team)
        problem.run(baseline, team, range(2))
        kfac = trainer(team, Strategy(1, "owners", "owner"), factor_every=100, basis_every=100)
        kfac.load_state_dict(whole_state(team, baseline))
        assert kfac.steps == 2
        return problem.run(kfac, team, range(2, 5))

    torch.testing.assert_close(run(comm), run(comm.Split(comm.rank)), rtol=0, atol=1e-10)
