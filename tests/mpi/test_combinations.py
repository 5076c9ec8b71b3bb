"""All combinations of preconditioner, Fisher, placement and weight sharing match one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import CommOpt, HybridOpt, MemOpt, Strategy
from support import problem

RANKS = mpikfac.world().size
SETTINGS = problem.SETTINGS | {"inv_update_steps": 2}
STEPS = range(3)  # factors and decompositions at 0 and 2
SHARING = "expand", "reduce"
ESTIMATORS = [
    *itertools.product(("eigen", "inverse", problem.UNSPLIT), ("mc", "type-2"), SHARING),
    *itertools.product(("eigen", "inverse", problem.UNSPLIT), ("empirical",), ("reduce",)),
    # a single damped factor: equal for all preconditioners
    (problem.UNSPLIT, "forward-only", "reduce"),
    *itertools.product(("eva",), ("empirical", "forward-only"), ("reduce",)),
]
"""Combinations missing in test_kinds.py; "eva" takes no labels from the model."""
PLACEMENTS = {
    "comm-opt": Strategy(CommOpt()),
    "mem-opt": Strategy(MemOpt()),
    "sharded-optimizer": Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
}
if RANKS == 4:  # other rank counts repeat a placement above
    PLACEMENTS["hybrid-opt"] = Strategy(
        HybridOpt(grad_workers=2, factor_reduction="reduce_scatter")
    )


class Tokens(nn.Module):
    """A convolution with pixels as tokens, a layer per token, and a layer of the tokens' mean."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, stride=3)
        self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, images):
        tokens = torch.tanh(self.convolution(images)).flatten(2).transpose(1, 2)
        return self.head(torch.tanh(self.token(tokens)).mean(1))


def network():
    torch.manual_seed(3)
    return Tokens().double()


def train(comm, strategy, shares, preconditioner, fisher, sharing):
    """Train with the given shares of the ranks, a share after a share; return the state."""

    def rule(layer):
        return replace(mpikfac.default_rule(layer), kfac_approx=sharing)

    model = network()
    choices = {**SETTINGS, "preconditioner": preconditioner, "fisher_type": fisher, "rule": rule}
    kfac = problem.kfac(model, problem.sgd_all(model), comm, strategy, **choices)
    for step in STEPS:
        kfac.optimizer.zero_grad()
        for share in shares:
            images, labels = problem.shards(step, RANKS)[share]
            torch.manual_seed(RANKS * step + share)  # the same labels on any rank
            outputs = model(images)
            kfac.record(outputs)
            (F.cross_entropy(outputs, labels) / len(shares)).backward()
        kfac.step()
    kfac.close()
    return problem.state(model)


@problem.by_one_process
def alone(own, *estimator):
    """Return the state of a single process that takes all shares."""
    return train(own, None, range(RANKS), *estimator)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda names: "-".join(map(str, names)))
def test_each_estimator_and_preconditioner_under_each_placement(comm, estimator, placement):
    """Oracle: a single process that takes all shares, with every share's drawn labels."""
    expected = alone(*estimator)
    found = train(comm, PLACEMENTS[placement], [comm.rank], *estimator)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(found, other) for other in comm.allgather(found))
    assert (found - problem.state(network())).abs().max() > 0.01


def test_no_two_estimators_are_the_same():
    """Oracle: different states: a choice without effect would give the state of a second choice."""
    for one, other in itertools.combinations(ESTIMATORS, 2):
        assert (alone(*one) - alone(*other)).abs().max() > 1e-6, (one, other)
