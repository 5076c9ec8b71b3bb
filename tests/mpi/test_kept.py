"""Averages and decompositions stored in bfloat16 match one process and the plan's bytes."""

from __future__ import annotations

import collections

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, MemOpt
from support import inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
BF16 = torch.bfloat16
KEPT = {
    "averages": {"factor_dtype": BF16},
    "bases": {"basis_dtype": BF16},
    "both": {"factor_dtype": BF16, "basis_dtype": BF16},
}
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
PLACEMENTS = {
    "everywhere": {"assignment": CommOpt()},
    "one worker": {"assignment": MemOpt()},
    "owners": OWNERS,
    "two owners of a layer": {"assignment": CommOpt(colocate_factors=False)},
    "layer by layer": {"assignment": CommOpt(), "transport.fusion": 1},
    "small factors everywhere": {"assignment": CommOpt(replicate_below=20)},
    "delayed": {"assignment": CommOpt(), "refresh.staleness": 1},
    "staggered": {"assignment": CommOpt(), "refresh.stagger": 3},
    "event-driven": {"assignment": CommOpt(), "refresh.tolerance": 0.3},
}
if RANKS == 4:  # as two nodes of two
    PLACEMENTS["in nodes"] = {"assignment": CommOpt(), "transport.ranks_per_node": 2}
OVER_TIME = "refresh.staleness", "refresh.stagger", "refresh.tolerance"
STEPS = range(7)


def trainer(comm, placement, **settings):
    model = problem.network()
    settings = problem.SETTINGS | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy_of(placement), **settings)


@problem.by_one_process
def alone(own, preconditioner, kept, **of_time):
    """Return the states after each step of a process with the joined batches."""
    serial = trainer(own, of_time, preconditioner=preconditioner, **KEPT[kept])
    return [problem.run(serial, own, [step]) for step in STEPS]


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("kept", KEPT)
def test_they_train_as_one_process_does_and_send_what_is_planned(
    comm, kept, placement, preconditioner
):
    """Oracle: a single process with the same dtypes, on the joined batch; the plan.

    The numbers agree to rounding in bfloat16: with few examples, eigenvectors of eigenvalue 0 are
    arbitrary.
    """
    start = problem.state(problem.network())
    kfac = trainer(comm, placement, preconditioner=preconditioner, **KEPT[kept])
    of_time = {name: placement[name] for name in OVER_TIME if name in placement}
    sent = collections.Counter()
    for step, expected in zip(STEPS, alone(preconditioner, kept, **of_time)):
        found = problem.run(kfac, comm, [step])
        sent += problem.planned(kfac, step)
        assert (found - expected).norm() < 0.05 * (expected - start).norm()
        assert all(torch.equal(found, other) for other in comm.allgather(found))
    if "refresh.staleness" not in placement:
        assert +collections.Counter(kfac.trace.sent) == sent
    memory = kfac.plan.memory(comm.rank)
    for name, arena in (("averages", inside.factors(kfac)), ("bases", inside.bases(kfac))):
        assert memory[name] == arena.flat.nbytes


@pytest.mark.parametrize(
    "placement", [*PLACEMENTS.values(), {"transport.reduce_factors_at": "inverses"}]
)
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(comm, placement):
    """Oracle: the run that wrote the checkpoint."""
    first, second = (trainer(comm, placement, **KEPT["both"]) for _ in range(2))
    problem.run(first, comm, range(4))
    second.load_state_dict(problem.whole_state(first, comm))
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)


@pytest.mark.parametrize("placement", [{"assignment": CommOpt()}, OWNERS])
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
