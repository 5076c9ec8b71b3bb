"""K-FAC with the factors of those ranks that are near the factors of most ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, MemOpt, Refresh, Strategy, Transport
from mpikfac.lab import NearestMajority
from mpikfac.plan import stages
from support import problem
from support.strategies import changed

pytestmark = pytest.mark.lab

RANKS = mpikfac.world().size
NEAR = {"sync.factor_aggregation": NearestMajority()}
WAYS = {
    "comm-opt": Strategy(CommOpt()),
    "mem-opt": Strategy(MemOpt()),
    "late": Strategy(CommOpt(), transport=Transport(reduce_factors_at="inverses")),
    "stagger": Strategy(
        CommOpt(), refresh=Refresh(stagger=2), transport=Transport(reduce_factors_at="inverses")
    ),
}


def kfac_of(comm, strategy, **settings):
    """Return a `KFAC` of the tests' network."""
    model = problem.network()
    settings = {**problem.SETTINGS, "inv_update_steps": 2, **settings}
    return problem.kfac(model, problem.sgd(model), comm, strategy, **settings)


@pytest.mark.parametrize("way", WAYS)
def test_with_all_ranks_near_factors_are_the_means(comm, way):
    """Oracle: the same strategy with plain means; shards differ, but none is too far."""
    ends = []
    for choices in ({}, {"sync.factor_aggregation": NearestMajority(threshold=1e6)}):
        kfac = kfac_of(comm, changed(WAYS[way], choices))
        ends.append(problem.run(kfac, comm, range(4)))
        kfac.close()
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


def trained(comm, strategy, wrong=None):
    """Return weights after steps on one batch of all ranks; rank 1 records `wrong` times inputs."""
    kfac = kfac_of(comm, strategy, kl_clip=None, damping=0.1)
    for step in range(4):
        images, labels = problem.shards(step, 1)[0]
        right = copy.deepcopy(kfac.model)
        F.cross_entropy(right(images), labels).backward()
        kfac.optimizer.zero_grad()
        scale = wrong if wrong is not None and comm.rank == 1 else 1.0
        F.cross_entropy(kfac.model(scale * images), labels).backward()
        for parameter, twin in zip(kfac.model.parameters(), right.parameters()):
            parameter.grad = twin.grad
        kfac.step()
    kfac.close()
    return problem.state(kfac.model)


@pytest.mark.skipif(RANKS < 3, reason="two ranks cannot tell which of them is wrong")
@pytest.mark.parametrize("wrong", [30.0, np.nan])
@pytest.mark.parametrize("way", ["comm-opt", "late"])
def test_factors_of_a_wrong_rank_do_not_count(comm, way, wrong):
    """Oracle: ranks that all have the right factors of one batch."""
    expected = trained(comm, WAYS[way])
    torch.testing.assert_close(trained(comm, changed(WAYS[way], NEAR), wrong), expected)
    if wrong == 30.0:
        assert not torch.allclose(trained(comm, WAYS[way], wrong), expected)


def test_messages_of_factors_are_the_plans(comm):
    """Oracle: the plan, message by message."""
    kfac = kfac_of(comm, changed(WAYS["comm-opt"], NEAR), trace=mpikfac.Trace(events=True))
    problem.run(kfac, comm, [0])
    planned = stages.reduce_statistics(kfac.plan.of(comm.rank))
    events = [(e.name, e.over, e.bytes) for e in kfac.trace.events if e.over]
    sums = [event for event in events if event[0] == "reduce statistics"]
    assert sums == [(m.stage, m.over, m.bytes) for m in planned]
    assert len(planned) == (3 if comm.size > 1 else 0)
    kfac.close()
