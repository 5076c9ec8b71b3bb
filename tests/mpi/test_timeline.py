"""The records of several ranks form a single timeline."""

from __future__ import annotations

import time

import pytest

import mpikfac
from mpikfac import HybridOpt, Strategy
from mpikfac.timeline import Recorded, waiting
from support import inside, problem

RANKS = mpikfac.world().size
STRATEGIES = problem.strategies(RANKS)
PRECONDITIONER = {"preconditioner": problem.UNSPLIT}


def recorded(comm, strategy):
    """Return K-FAC that has recorded all steps, and the events of every step."""
    model = problem.network()
    trace = mpikfac.Trace(events=True)
    settings = problem.SETTINGS | PRECONDITIONER
    kfac = problem.kfac(model, problem.sgd(model), comm, strategy, **settings, trace=trace)
    steps = []
    for step in range(problem.STEPS):
        before = len(trace.events)
        problem.run(kfac, comm, [step])
        steps.append(trace.events[before:])
    return kfac, steps


@pytest.mark.parametrize("strategy", STRATEGIES, ids=problem.label)
def test_events_are_the_plans_messages(comm, strategy):
    """Oracle: the plan: stage, communicator and bytes of every message, in order."""
    kfac, steps = recorded(comm, strategy)
    for step, events in enumerate(steps):
        kind = step % 2 == 0, step % 3 == 0
        planned = [(m.stage, m.over, m.bytes) for m in kfac.plan.messages(comm.rank, *kind)]
        assert [(e.name, e.over, e.bytes) for e in events if e.over] == planned


@pytest.mark.parametrize("strategy", STRATEGIES, ids=problem.label)
def test_members_of_a_communicator_see_the_same_collectives(comm, strategy):
    """Oracle: the communicator's members."""
    kfac, steps = recorded(comm, strategy)
    grid = inside.grid(kfac)
    for over, team in (("world", grid.world), ("column", grid.column), ("row", grid.row)):
        issued = [event.name for events in steps for event in events if event.over == over]
        assert len(set(map(tuple, team.allgather(issued)))) == 1


def best_offset(comm, expected=0.0):
    """Return the measured offset nearest to the expected offset: busy machines delay readings."""
    return min(
        (mpikfac.comm.clock_offset(comm) for _ in range(10)), key=lambda o: abs(o - expected)
    )


def test_clocks_of_one_host_agree(comm):
    """Oracle: `perf_counter`, a single clock for all processes of a host."""
    assert abs(best_offset(comm)) < 1e-3


def test_a_clock_that_is_ahead_is_found_out(comm, monkeypatch):
    """Oracle: the clock's lead."""
    clock, ahead = time.perf_counter, 50.0 * comm.rank
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead)
    assert best_offset(comm, -ahead) == pytest.approx(-ahead, abs=1e-3)


@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
def test_nobody_leaves_an_allreduce_before_all_have_come(comm, monkeypatch, workers):
    """Oracle: MPI; clocks far apart, set by measured offsets."""
    clock, ahead = time.perf_counter, 50.0 * comm.rank
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead)
    began = time.perf_counter()
    kfac, _ = recorded(comm, Strategy(HybridOpt(grad_workers=workers)))
    mine = Recorded({0: (began, time.perf_counter())}, kfac.trace.events)
    ranks = comm.allgather(mine.later(best_offset(comm, -ahead)))
    for stage, sums in (("reduce statistics", 2), ("reduce gradients", problem.STEPS)):
        # Copies between a GPU and the host count for the stage too, and send nothing.
        events = [[e for e in rank.events if e.name == stage and e.over] for rank in ranks]
        assert len(events[0]) == (sums if RANKS > 1 else 0)
        for together in zip(*events):
            assert min(e.end for e in together) > max(e.start for e in together) - 1e-3
    for rank, waits in zip(ranks, waiting([rank.events for rank in ranks], kfac.plan.grid.columns)):
        assert all(0 <= wait <= e.end - e.start for e, wait in zip(rank.events, waits))
