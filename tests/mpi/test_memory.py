"""The memory of every rank, and bounds on the bytes sent."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac import HybridOpt, MemOpt, Strategy
from mpikfac_apps.problems import models
from support import inside, problem

RANKS = mpikfac.world().size


def trainer(comm, strategy):
    model = problem.network()
    return problem.kfac(model, problem.sgd(model), comm, strategy, **problem.SETTINGS)


@pytest.mark.parametrize("strategy", problem.strategies(RANKS), ids=problem.label)
def test_every_rank_keeps_the_plans_bytes(comm, strategy):
    """Oracle: the plan's memory, rank by rank."""
    kfac = trainer(comm, strategy)
    assert inside.memory(kfac) == kfac.plan.memory(comm.rank)


@pytest.mark.parametrize("reduction", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
def test_factor_memory_of_resnet32(comm, workers, reduction):
    """Oracle: X (1 + f) for the bytes X of all factors and the fraction f of workers.

    With "owners" the averages, half of X as triangles, are spread over the ranks.
    """
    model = models.build("resnet32", classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = mpikfac.KFAC(
        model,
        optimizer,
        comm,
        Strategy(HybridOpt(grad_workers=workers, factor_reduction=reduction)),
    )
    kept = inside.memory(kfac)
    assert kept == kfac.plan.memory(comm.rank)
    found = kept["statistics"] + kept["averages"] + kept["bases"]
    x = 4 * sum(factor.work(2) for layer in inside.layers(kfac) for factor in layer.shape.factors)
    spread = 1 if reduction == "allreduce" else 1 / comm.size
    expected = x * ((1 + spread) / 2 + workers / comm.size)
    assert comm.allreduce(found) / comm.size == pytest.approx(expected, rel=0.01)
    if comm.size == 4 and reduction == "allreduce":
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
def test_statistics_travel_as_triangles(comm):
    """Oracle: n (n + 1) / 2 numbers of 8 bytes for n = 18, 9, 82, 4, 37, 5, rounded up to 16.

    Every factor's number of examples takes 16 numbers more.
    """
    kfac = trainer(comm, Strategy(MemOpt()))
    problem.run(kfac, comm, [0])
    assert kfac.trace.sent["reduce statistics"] == 8 * (176 + 48 + 3408 + 16 + 704 + 16 + 6 * 16)


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
def test_owners_that_step_send_no_more_than_data_parallelism(comm):
    """Oracle: the baseline's reduced gradients, and equally many gathered weights.

    A ring's Allreduce is a Reduce_scatter and an Allgather; the clip sends 8 bytes more.
    """
    model = problem.network()
    baseline = mpikfac.FirstOrderTrainer(model, problem.sgd(model), comm)
    problem.run(baseline, comm, [0])
    kfac = trainer(comm, Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)))
    problem.run(kfac, comm, [0])
    kfac.trace.clear()
    problem.run(kfac, comm, [1])
    padding = 8 * 16 * len(baseline.plan.uncovered)  # blocks differ: weight and bias are one matrix
    whole = baseline.trace.sent["reduce gradients"]
    assert abs(kfac.trace.sent["reduce gradients"] - whole) <= padding
    assert abs(comm.allreduce(kfac.trace.sent["publish weights"]) - whole) <= padding
    assert kfac.trace.sent["clip"] == 8
    assert len(kfac.trace.sent) == 3
