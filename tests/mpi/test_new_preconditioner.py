"""A new preconditioner, distributed in every way, matches one process."""

from __future__ import annotations

import collections

import pytest
import torch

import mpikfac
from mpikfac import BFloat16, CommOpt, Compression, Refresh, Strategy, Transport
from mpikfac.lab import CurvatureServers
from support import diagonal, oracles, problem
from support.diagonal import Diagonal

RANKS = mpikfac.world().size
SETTINGS = problem.SETTINGS | {"preconditioner": Diagonal()}
STRATEGIES = {
    **{problem.label(s): s for s in problem.strategies(RANKS, ["allreduce", "reduce_scatter"])},
    "staggered": Strategy(CommOpt(), refresh=Refresh(stagger=3)),
    "compressed": Strategy(CommOpt(), compression=Compression(inverses=BFloat16())),
    "overlapped": Strategy(CommOpt(), transport=Transport(fusion=1, overlap=True)),
}


def trainer(comm, strategy):
    model = problem.network()
    return problem.kfac(model, problem.sgd(model), comm, strategy, **SETTINGS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_the_textbooks(comm, monkeypatch, name):
    """Oracle: dense solves with the diagonals, on the joined shards; the plan's bytes."""
    monkeypatch.setitem(oracles.SOLVES, "diagonal", diagonal.dense_solve)
    expected = problem.network()
    steps = [problem.shards(step, RANKS) for step in range(problem.STEPS)]
    named = problem.SETTINGS | {"preconditioner": "diagonal"}
    oracles.train(expected, problem.sgd(expected), steps, **named)
    kfac = trainer(comm, STRATEGIES[name])
    for step in range(problem.STEPS):
        kfac.trace.clear()
        found = problem.run(kfac, comm, [step])
        if name != "overlapped":
            assert +collections.Counter(kfac.trace.sent) == problem.planned(kfac, step)
    kfac.close()
    tolerance = {"compressed": 1e-2, "staggered": 1e-1}.get(name, 1e-10)
    torch.testing.assert_close(found, problem.state(expected), rtol=0, atol=tolerance)
    assert all(torch.equal(found, other) for other in comm.allgather(found))


@pytest.mark.skipif(RANKS == 1, reason="one rank has none to spare for curvature")
def test_curvature_servers_know_the_preconditioner(comm):
    """Oracle: the same training ranks with a background of their own."""
    team = mpikfac.split_comm(comm, 1)
    if team.comm is None:
        mpikfac.lab.run_curvature_server(team)
        return
    ends = []
    for refresh, of in ((CurvatureServers(), team), (Refresh(staleness=1), team.comm)):
        strategy = Strategy(CommOpt(), refresh=refresh)
        kfac = trainer(of, strategy)
        ends.append(problem.run(kfac, team.comm, range(6)))
        kfac.close()
    assert torch.equal(*ends)
