"""Attention and recurrent cells match one process with every placement."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac import CommOpt, MemOpt, Strategy, Transport
from support import inner, problem

RANKS = mpikfac.world().size
KINDS = (*inner.TO, *inner.CELLS)
STRATEGIES = [
    *problem.strategies(RANKS, ["allreduce", "reduce_scatter"]),
    Strategy(
        MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True),
        transport=Transport(reduce_factors_at="inverses"),
    ),
    Strategy(CommOpt(), transport=Transport(packing="square", fusion=1)),
]
OVERLAPPED = Strategy(CommOpt(replicate_below=5), transport=Transport(fusion=2, overlap=True))


def train(comm, strategy, ranks, kind, fisher_type="empirical", preconditioner="eigen"):
    """Train on the rank's shards of `ranks` shards; return all numbers of the network."""
    network, _ = inner.pair(kind)
    optimizer = problem.sgd_all(network)
    settings = problem.SETTINGS | {
        "damping": 0.1,
        "preconditioner": preconditioner,
        "fisher_type": fisher_type,
    }
    kfac = problem.kfac(network, optimizer, comm, strategy, **settings)
    problem.train_on_shards(kfac, comm, ranks, map(problem.batch, range(problem.STEPS)))
    return inner.weights(network)


@problem.by_one_process
def alone(own, *given, **settings):
    """Return the numbers of a single process on the joined batches."""
    return train(own, Strategy(MemOpt()), 1, *given, **settings)


def assert_as_one_process(comm, strategy, kind, **settings):
    expected = alone(kind, **settings)
    found = train(comm, strategy, RANKS, kind, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (expected - inner.weights(inner.pair(kind)[0])).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_each_placement(comm, strategy, kind):
    """Oracle: one process on the joined batches."""
    assert_as_one_process(comm, strategy, kind)


@pytest.mark.parametrize("kind", inner.TO)
def test_overlapped_statistics_wait_for_all_groups(comm, kind):
    """Oracle: one process on the joined batches."""
    assert_as_one_process(comm, OVERLAPPED, kind)
    assert_as_one_process(comm, OVERLAPPED, kind, fisher_type="type-2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"preconditioner": "inverse"}, {"preconditioner": problem.UNSPLIT, "fisher_type": "type-2"}],
    ids=str,
)
def test_other_preconditioners(comm, kind, settings):
    """Oracle: one process on the joined batches."""
    assert_as_one_process(comm, Strategy(CommOpt()), kind, **settings)
