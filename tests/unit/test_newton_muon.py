"""Newton-Muon, which uses only the factor A to compute orthogonal directions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import mpikfac
from mpikfac import KFAC, AdamGrafting, Damping, Estimator, KFACOptimizer, MemOpt, Strategy
from mpikfac.plan import LayerShape
from support import gradients, inside

STEPS, RATE, MOMENTUM, DECAY, EVERY, SHARE = 20, 0.05, 0.9, 0.9, 3, 0.2


class Inverses:
    """The inverses of A with a share of the mean eigenvalue, made every `EVERY` steps in numpy."""

    def __init__(self) -> None:
        self.moments, self.inverses, self.steps = {}, {}, 0

    def see(self, model: nn.Module, inputs: torch.Tensor) -> None:
        self.steps += 1
        for layer, groups in gradients.rows(model, inputs).items():
            for number, rows in enumerate(groups):
                self.learn(f"{layer} {number}", rows.T @ rows / len(rows))

    def learn(self, name: str, moment: np.ndarray) -> None:
        average = self.moments[name] = DECAY * self.moments.get(name, 0) + (1 - DECAY) * moment
        if self.steps % EVERY == 1:
            a = average / (1 - DECAY**self.steps)
            share = SHARE * np.trace(a) / len(a)
            self.inverses[name] = np.linalg.inv(a + share * np.eye(len(a)))


def newton_muon(model, comm, strategy=None, **choices):
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    grafting = AdamGrafting(momentum=MOMENTUM, max_trust_ratio=math.inf)
    estimator = Estimator(fisher_type="forward-only", factor_decay=DECAY)
    usual = {
        "grafting": grafting,
        "estimator": estimator,
        "factor_update_steps": 1,
        "inv_update_steps": EVERY,
    }
    return KFAC(model, sgd, comm, strategy, preconditioner="newton-muon", **usual | choices)


@pytest.mark.parametrize("kind", gradients.NETWORKS)
def test_newton_muon_steps_as_the_formulas_do(comm, kind):
    """Oracle: inverses and singular values in numpy, inputs of layers by hand, for 20 steps."""
    momenta, inverses = gradients.Momenta(MOMENTUM), Inverses()

    def direction(name, g):
        return gradients.polar(momenta(name, g) @ inverses.inverses[name])

    of_adams_length = gradients.OfAdamsLength(direction)
    expected = gradients.by_hand(kind, STEPS, of_adams_length, RATE, inverses.see)
    kfac = newton_muon(gradients.network(kind), comm)
    gradients.train(kfac, kind, range(STEPS), comm)
    found, right = (nn.utils.parameters_to_vector(m.parameters()) for m in (kfac.model, expected))
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("make", [KFAC, KFACOptimizer])
def test_newton_muon_takes_the_published_values_by_default(comm, make):
    """Oracle: a share of 0.2, inputs alone, and a momentum of 0.95 [Newton-Muon]."""
    model = gradients.network("linear")
    if make is KFAC:
        sgd = torch.optim.SGD(model.parameters(), lr=RATE)
        usual = KFAC(model, sgd, comm, preconditioner="newton-muon")
        assert inside.settings(usual).grafting == AdamGrafting(momentum=0.95)
    else:  # the momentum is the optimizer's
        usual = KFACOptimizer(model, comm=comm, preconditioner="newton-muon").trainer
    assert inside.settings(usual).damping == Damping(relative=0.2)
    assert not any(factor.name.endswith(".G") for factor in usual.plan.factors.values())


def test_a_plan_has_no_factors_of_outputs():
    """Oracle: the names of factors; the layer has both."""
    plan = mpikfac.make_plan(
        [LayerShape("a", 6, 4)], 2, Strategy(MemOpt()), preconditioner="newton-muon"
    )
    assert [*plan.factors] == ["a.A"]


def test_gradients_of_outputs_are_refused(comm):
    """Oracle: the line names the need."""
    with pytest.raises(
        ValueError, match="needs fisher_type='forward-only', not 'empirical'"
    ) as refusal:
        newton_muon(gradients.network("linear"), comm, estimator=Estimator())
    assert "\n" not in str(refusal.value)
