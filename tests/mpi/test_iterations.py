"""Eigenvectors renewed by iteration match one process, on any ranks and after restarts."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import mpikfac
from mpikfac import CommOpt, Eigen, HybridOpt, MemOpt
from mpikfac.preconditioners import EKFAC
from support import inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
ONCE = Eigen(iterations=1)
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
PLACEMENTS = {
    "COMM-OPT": {"assignment": CommOpt()},
    "MEM-OPT": {"assignment": MemOpt()},
    "two owners of a layer": {"assignment": CommOpt(colocate_factors=False)},
    "two owners of a layer, one worker": {"assignment": MemOpt(colocate_factors=False)},
    "sharded-optimizer": OWNERS,
    "factors to owners": {
        "assignment": CommOpt(colocate_factors=False, factor_reduction="reduce_scatter")
    },
    "small factors everywhere": {"assignment": CommOpt(replicate_below=20)},
    "late": {"assignment": CommOpt(), "transport.reduce_factors_at": "inverses"},
    "staggered and delayed": {
        "assignment": CommOpt(),
        "refresh.staleness": 1,
        "refresh.stagger": 3,
    },
}
if RANKS == 4:
    PLACEMENTS["hybrid"] = {
        "assignment": HybridOpt(grad_workers=2, factor_reduction="reduce_scatter")
    }
    PLACEMENTS["hybrid, two owners of a layer"] = {
        "assignment": HybridOpt(grad_workers=2, colocate_factors=False)
    }
    PLACEMENTS["hybrid, sharded-optimizer"] = {
        "assignment": HybridOpt(
            grad_workers=2, factor_reduction="reduce_scatter", shard_optimizer=True
        )
    }
OVER_TIME = "refresh.stagger", "refresh.staleness"
STEPS = range(10)  # three refreshes, or a refresh of every share


def trainer(comm, placement, preconditioner=ONCE, tolerance=1e9):
    """Return K-FAC for the layers with factors of full rank, whose eigenvectors are no choice."""
    model = problem.network()
    strategy = strategy_of(placement, {"refresh.tolerance": tolerance})
    settings = problem.SETTINGS | {"preconditioner": preconditioner, "skip": ["5"]}
    return problem.kfac(model, problem.sgd_all(model), comm, strategy, **settings)


@problem.by_one_process
def alone(own, over_time, preconditioner=ONCE):
    """Return the states after each step of one process with the joined batches."""
    serial = trainer(own, dict(over_time), preconditioner)
    return [problem.run(serial, own, [step]) for step in STEPS]


def of_time(placement):
    return tuple((name, placement[name]) for name in OVER_TIME if name in placement)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_ranks_train_as_one_process_does(comm, name):
    """Oracle: a single process with the joined batch, to rounding; not the run by eigh."""
    kfac = trainer(comm, PLACEMENTS[name])
    by_eigh = alone(of_time(PLACEMENTS[name]), "eigen")
    found = [problem.run(kfac, comm, [step]) for step in STEPS]
    for state, expected in zip(found, alone(of_time(PLACEMENTS[name]))):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)
    assert (found[-1] - by_eigh[-1]).abs().max() > 1e-6


def test_ekfac_trains_as_one_process_does(comm):
    """Oracle: a single process with the joined batch, to rounding."""
    placement, preconditioner = {"assignment": CommOpt()}, EKFAC(iterations=2)
    kfac = trainer(comm, placement, preconditioner)
    for step, expected in zip(STEPS, alone((), preconditioner)):
        torch.testing.assert_close(problem.run(kfac, comm, [step]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_run_on_fewer_ranks_goes_on_from_the_same_vectors(comm, delay):
    """Oracle: the run that wrote the state and continued on all ranks, to rounding.

    With three ranks the run goes on with two, with four with three.
    """
    placement = {
        "assignment": CommOpt(colocate_factors=False, factor_reduction="reduce_scatter"),
        "refresh.staleness": delay,
    }
    first = trainer(comm, placement)
    problem.run(first, comm, range(4))
    state = problem.whole_state(first, comm)
    expected = problem.run(first, comm, range(4, 10))
    fewer = comm.Split(0 if comm.rank < max(1, RANKS - 1) else MPI.UNDEFINED)
    if fewer != MPI.COMM_NULL:
        one_worker = MemOpt(colocate_factors=False, factor_reduction="reduce_scatter")
        second = trainer(fewer, placement | {"assignment": one_worker})
        second.load_state_dict(state)
        found = problem.run(second, fewer, range(4, 10))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert inside.settled(second)
