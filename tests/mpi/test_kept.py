"""Averages and decompositions kept in bfloat16: one process's numbers, and the plan's bytes."""

from __future__ import annotations

import collections

import pytest
import torch

import mpikfac
from mpikfac import Strategy
from support import inside, problem

RANKS = mpikfac.world().size
BF16 = torch.bfloat16
KEPT = {
    "averages": {"factor_dtype": BF16},
    "bases": {"basis_dtype": BF16},
    "both": {"factor_dtype": BF16, "basis_dtype": BF16},
}
OWNERS = {"workers": 1, "reduction": "owners", "update": "owner"}
PLACEMENTS = {
    "everywhere": {"workers": RANKS},
    "one worker": {"workers": 1},
    "owners": OWNERS,
    "two owners of a layer": {"workers": RANKS, "colocate_factors": False},
    "layer by layer": {"workers": RANKS, "fusion": 1},
    "small factors everywhere": {"workers": RANKS, "replicate_below": 20},
    "delayed": {"workers": RANKS, "delay": 1},
    "staggered": {"workers": RANKS, "stagger": 3},
    "event-driven": {"workers": RANKS, "tolerance": 0.3},
}
if RANKS == 4:  # as two nodes of two
    PLACEMENTS["in nodes"] = {"workers": RANKS, "ranks_per_node": 2}
OVER_TIME = "delay", "stagger", "tolerance"
STEPS = range(7)


def trainer(comm, placement, **settings):
    model = problem.network()
    settings = problem.SETTINGS | settings
    return problem.kfac(
        model, problem.sgd(model), comm, Strategy().changed(**placement), **settings
    )


@problem.by_one_process
def alone(own, solver, kept, **of_time):
    """Return the states after each step of a process with the joined batches."""
    serial = trainer(own, of_time, solver=solver, **KEPT[kept])
    return [problem.run(serial, own, [step]) for step in STEPS]


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("kept", KEPT)
def test_they_train_as_one_process_does_and_send_what_is_planned(comm, kept, placement, solver):
    """Oracle: a single process with the same dtypes, on the joined batch; the plan.

    The numbers agree to rounding in bfloat16: with few examples, eigenvectors of eigenvalue 0 are
    arbitrary.
    """
    start = problem.state(problem.network())
    kfac = trainer(comm, placement, solver=solver, **KEPT[kept])
    of_time = {name: placement[name] for name in OVER_TIME if name in placement}
    sent = collections.Counter()
    for step, expected in zip(STEPS, alone(solver, kept, **of_time)):
        found = problem.run(kfac, comm, [step])
        sent += problem.planned(kfac, step)
        assert (found - expected).norm() < 0.05 * (expected - start).norm()
        assert all(torch.equal(found, other) for other in comm.allgather(found))
    if "delay" not in placement:
        assert +collections.Counter(kfac.trace.sent) == sent
    memory = kfac.plan.memory(comm.rank)
    for name, arena in (("averages", inside.factors(kfac)), ("bases", inside.bases(kfac))):
        assert memory[name] == arena.flat.nbytes


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), {"reduce_at": "bases"}])
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(comm, placement):
    """Oracle: the run that wrote the checkpoint."""
    first, second = (trainer(comm, placement, **KEPT["both"]) for _ in range(2))
    problem.run(first, comm, range(4))
    second.load_state_dict(problem.whole_state(first, comm))
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)


@pytest.mark.parametrize("placement", [{"workers": RANKS}, OWNERS])
@pytest.mark.parametrize("towards", ["rounded", "exact"])
def test_a_checkpoint_may_have_them_in_another_dtype(comm, placement, towards):
    """Oracle: the checkpoint's numbers, rounded or unchanged."""
    kept = [{}, KEPT["both"]] if towards == "rounded" else [KEPT["both"], {}]
    first, second = (trainer(comm, placement, **dtypes) for dtypes in kept)
    problem.run(first, comm, range(4))
    second.load_state_dict(problem.whole_state(first, comm))
    for ours, theirs in (
        (inside.factors(second), inside.factors(first)),
        (inside.bases(second), inside.bases(first)),
    ):
        assert ours.flat.dtype != theirs.flat.dtype
        assert torch.equal(ours.flat, theirs.flat.to(ours.flat.dtype))
