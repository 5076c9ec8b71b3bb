"""Eigenvectors renewed by iterations: one process's numbers on any ranks, and after a restart."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import mpikfac
from mpikfac import Eigen, Strategy
from mpikfac.solvers import Ekfac
from support import inside, problem

RANKS = mpikfac.world().size
ONCE = Eigen(iterations=1)
OWNERS = {"workers": 1, "reduction": "owners", "update": "owner"}
PLACEMENTS = {
    "COMM-OPT": {"workers": RANKS},
    "MEM-OPT": {"workers": 1},
    "two owners of a layer": {"workers": RANKS, "colocate_factors": False},
    "two owners of a layer, one worker": {"workers": 1, "colocate_factors": False},
    "sharded-optimizer": OWNERS,
    "factors to owners": {"workers": RANKS, "reduction": "owners", "colocate_factors": False},
    "small factors everywhere": {"workers": RANKS, "replicate_below": 20},
    "late": {"workers": RANKS, "reduce_at": "bases"},
    "staggered and delayed": {"workers": RANKS, "stagger": 3, "delay": 1},
}
if RANKS == 4:
    PLACEMENTS["hybrid"] = {"workers": 2, "reduction": "owners"}
    PLACEMENTS["hybrid, two owners of a layer"] = {"workers": 2, "colocate_factors": False}
    PLACEMENTS["hybrid, sharded-optimizer"] = OWNERS | {"workers": 2}
OVER_TIME = "stagger", "delay"
STEPS = range(10)  # three refreshes, or a refresh of every share


def trainer(comm, placement, solver=ONCE, tolerance=1e9):
    """Return K-FAC for the layers with factors of full rank, whose eigenvectors are no choice."""
    model = problem.network()
    strategy = Strategy().changed(**placement, tolerance=tolerance)
    settings = problem.SETTINGS | {"solver": solver, "skip": ["5"]}
    return problem.kfac(model, problem.sgd_all(model), comm, strategy, **settings)


@problem.by_one_process
def alone(own, over_time, solver=ONCE):
    """Return the states after each step of one process with the joined batches."""
    serial = trainer(own, dict(over_time), solver)
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
    placement, solver = {"workers": RANKS}, Ekfac(iterations=2)
    kfac = trainer(comm, placement, solver)
    for step, expected in zip(STEPS, alone((), solver)):
        torch.testing.assert_close(problem.run(kfac, comm, [step]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_run_on_fewer_ranks_goes_on_from_the_same_vectors(comm, delay):
    """Oracle: the run that wrote the state and continued on all ranks, to rounding.

    With three ranks the run goes on with two, with four with three.
    """
    placement = {"workers": RANKS, "reduction": "owners", "colocate_factors": False, "delay": delay}
    first = trainer(comm, placement)
    problem.run(first, comm, range(4))
    state = problem.whole_state(first, comm)
    expected = problem.run(first, comm, range(4, 10))
    fewer = comm.Split(0 if comm.rank < max(1, RANKS - 1) else MPI.UNDEFINED)
    if fewer != MPI.COMM_NULL:
        second = trainer(fewer, placement | {"workers": 1})
        second.load_state_dict(state)
        found = problem.run(second, fewer, range(4, 10))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert inside.settled(second)
