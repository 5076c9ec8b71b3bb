"""Factors of which only the leading eigenvectors are kept: the plan's bytes, and restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, Compression, Int8, MemOpt, Refresh, Strategy, Transport
from support import inside, problem

RANKS = mpikfac.world().size
SENT = {
    "everywhere": Strategy(CommOpt()),
    "one worker": Strategy(MemOpt()),
    "to owners, apart": Strategy(
        CommOpt(colocate_factors=False, factor_reduction="reduce_scatter")
    ),
    "owners": Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
    "staggered, late": Strategy(
        CommOpt(), refresh=Refresh(stagger=3), transport=Transport(reduce_factors_at="inverses")
    ),
    "small ones everywhere": Strategy(CommOpt(replicate_below=10)),
    "factors in 8 bits": Strategy(CommOpt(), compression=Compression(factors=Int8())),
}


def low(layer):
    """Return the usual factors with three kept eigenvectors."""
    return replace(mpikfac.default_rule(layer), rank=3)


def trainer(comm, strategy, **settings):
    model = problem.network()
    choices = problem.SETTINGS | {"rule": low} | settings
    return problem.kfac(model, problem.sgd(model), comm, strategy, **choices)


@pytest.mark.parametrize("name", SENT)
def test_bytes_and_memory_are_the_plans(comm, name):
    """Oracle: the plan; weights of all ranks, to the last bit; more bytes for whole bases."""
    kfac = trainer(comm, SENT[name])
    whole = trainer(comm, SENT[name], rule=mpikfac.default_rule)
    for step in range(2 * problem.STEPS):
        kfac.trace.clear()
        state = problem.run(kfac, comm, [step])
        assert state.isfinite().all()
        assert +Counter(kfac.trace.sent) == problem.planned(kfac, step)
        assert all(torch.equal(state, other) for other in comm.allgather(state))
    planned = kfac.plan.memory(comm.rank)
    held = inside.memory(kfac)
    assert held["bases"] == planned["bases"]
    assert held["denominators"] == planned["denominators"]
    if held["bases"]:
        assert planned["bases"] < whole.plan.memory(comm.rank)["bases"]


@pytest.mark.parametrize("tolerance", [0.0, 0.3])
def test_a_run_goes_on_from_another_placement(comm, tolerance):
    """Oracle: the same run under a single placement; also with pending decompositions."""
    first = trainer(comm, Strategy(CommOpt(), refresh=Refresh(staleness=2, tolerance=tolerance)))
    problem.run(first, comm, range(4))
    shared = problem.whole_state(first, comm)
    second = trainer(comm, Strategy(MemOpt(), refresh=Refresh(staleness=2, tolerance=tolerance)))
    second.load_state_dict(shared)
    found, expected = (problem.run(kfac, comm, range(4, 8)) for kfac in (second, first))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
