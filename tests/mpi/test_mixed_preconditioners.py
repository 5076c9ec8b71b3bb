"""Layers with different preconditioners match one process and the plan's bytes."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, HybridOpt, MemOpt
from mpikfac.lab import CurvatureServers
from support import inside, problem
from support.strategies import strategy_of

RANKS = mpikfac.world().size
OWNERS = {"assignment": MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)}
PLACEMENTS = {
    "COMM-OPT": {"assignment": CommOpt()},
    "MEM-OPT": {"assignment": MemOpt()},
    "sharded-optimizer": OWNERS,
    "factors to owners": {"assignment": CommOpt(factor_reduction="reduce_scatter")},
    "small factors everywhere": {"assignment": CommOpt(replicate_below=20)},
    "late": {"assignment": CommOpt(), "transport.reduce_factors_at": "inverses"},
    "overlapped": {"assignment": CommOpt(), "transport.fusion": 1, "transport.overlap": True},
    "staggered": {"assignment": CommOpt(), "refresh.stagger": 3},
}
if RANKS == 4:
    PLACEMENTS["hybrid"] = {"assignment": HybridOpt(grad_workers=2)}
    PLACEMENTS["hybrid, sharded-optimizer"] = {
        "assignment": HybridOpt(
            grad_workers=2, factor_reduction="reduce_scatter", shard_optimizer=True
        )
    }
OVER_TIME = "refresh.stagger", "transport.reduce_factors_at"
MIXTURE = {"0": "inverse", "3": "eigen", "5": "eva"}
WITH_SCALES = {"0": "ekfac", "3": "eva", "5": "inverse"}
STEPS = range(7)


def trainer(comm, placement, mixture=MIXTURE, **more):
    model = problem.network()

    def rule(layer):
        return dataclasses.replace(layer, preconditioner=mixture[layer.name])

    optimizer = problem.sgd(model)
    strategy = strategy_of(placement)
    return problem.kfac(model, optimizer, comm, strategy, rule=rule, **problem.SETTINGS, **more)


@pytest.mark.parametrize(
    ("placement", "mixture"),
    [
        *((placement, MIXTURE) for placement in PLACEMENTS.values()),
        ({"assignment": CommOpt()}, WITH_SCALES),
    ],
    ids=[*PLACEMENTS, "with scales"],
)
def test_they_train_as_one_process_does_and_send_what_is_planned(comm, placement, mixture):
    """Oracle: a single process with the joined batch, to rounding; the plan."""
    kfac = trainer(comm, placement, mixture)
    of_time = {name: placement[name] for name in OVER_TIME if name in placement}
    own = comm.Split(comm.rank)
    serial = trainer(own, of_time, mixture)
    expected = collections.Counter()
    for step in STEPS:
        found = problem.run(kfac, comm, [step])
        expected += problem.planned(kfac, step)
        alone = problem.run(serial, own, [step])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)
        assert all(torch.equal(found, other) for other in comm.allgather(found))
    inside.settle(kfac)  # sends the last factors, if overlapped
    assert +collections.Counter(kfac.trace.sent) == expected
    kfac.close()


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(comm, placement):
    """Oracle: the run that wrote the checkpoint."""
    first, second = (trainer(comm, placement) for _ in range(2))
    problem.run(first, comm, range(4))
    state = problem.whole_state(first, comm)
    second.load_state_dict(state)
    expected = problem.run(first, comm, range(4, 8))
    assert torch.equal(problem.run(second, comm, range(4, 8)), expected)
    first.close()
    second.close()


@pytest.mark.skipif(RANKS == 1, reason="one rank has none to spare for curvature")
def test_a_curvature_rank_decomposes_each_layer_by_its_preconditioner(comm):
    """Oracle: the training ranks alone, with decompositions in the background; to the last bit."""
    team = mpikfac.split_comm(comm, 1)
    if team.comm is None:
        mpikfac.lab.run_curvature_server(team)
        return
    training = team.comm
    mixture = MIXTURE | {"5": "inverse"}
    choices = {"assignment": CommOpt(), "refresh.staleness": 2}
    spared = choices | {"refresh": CurvatureServers()}
    found = trainer(team, spared, mixture)
    state = problem.run(found, training, STEPS)
    found.close()
    assert torch.equal(state, problem.run(trainer(training, choices, mixture), training, STEPS))
