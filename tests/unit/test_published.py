"""Preconditioners of the averaged gradient, compared with published optimizers on one layer."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac import KFAC, AdamGrafting, AdamInEigenbases, Damping, Estimator
from mpikfac.numerics.orthogonal import orthogonalised
from mpikfac.plan import Grafting

published = pytest.importorskip(
    "pytorch_optimizer",
    reason="pytorch_optimizer is not installed; run pip install pytorch_optimizer",
)
pytestmark = pytest.mark.gate
STEPS, RATE, ORDER = 8, 0.01, 6


def layer(columns: int = ORDER) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, ORDER, bias=False).double())


def gradient(step: int, columns: int = ORDER) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ORDER, columns, generator=generator, dtype=torch.float64)


def moves(model: nn.Module, optimizer, steps) -> list[torch.Tensor]:
    """Return the changes of the weight in steps by given gradients."""
    (weight,), found = model.parameters(), []
    for step in steps:
        before = weight.detach().clone()
        weight.grad = gradient(step, weight.shape[1])
        optimizer.step()
        found.append(weight.detach() - before)
    return found


def ours(
    preconditioner: str, grafting: Grafting, columns: int = ORDER, **settings
) -> list[torch.Tensor]:
    model = layer(columns)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    kfac = KFAC(
        model, sgd, mpikfac.world(), preconditioner=preconditioner, grafting=grafting, **settings
    )
    return moves(model, kfac, range(STEPS))


def test_soap_in_fixed_bases_is_the_published_soap():
    """Oracle: SOAP of pytorch_optimizer, which makes bases of the first gradient and skips a step.

    Without momentum, as ours is Nesterov's and begins at 0; without small eigenvalues; and without
    a second refresh, which is a step of a power iteration there. The small number beside roots is
    added before a bias is corrected there.
    """
    model = layer()
    settings = {"betas": (0.0, 0.95), "weight_decay": 0.0, "precondition_frequency": 1000}
    soap = published.SOAP(model.parameters(), lr=RATE, **settings)
    moves(model, soap, [0])
    expected = moves(model, soap, range(STEPS))
    grafting = AdamInEigenbases(momentum=0.0, max_trust_ratio=math.inf)
    choices = {"damping": Damping(relative=1e-9), "inv_update_steps": 1000}
    found = ours("soap", grafting, estimator=Estimator(factor_decay=0.95), **choices)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("columns", [4, 9])
@pytest.mark.parametrize(
    ("preconditioner", "name"),
    [("muon", "Muon"), ("normuon", "NorMuon")],
)
def test_directions_without_factors_are_the_published(monkeypatch, preconditioner, name, columns):
    """Oracle: Muon and NorMuon of pytorch_optimizer with our polynomials; any length.

    Theirs leave singular values between 0.7 and 1.2 and multiply in bfloat16; test_orthogonal.py
    tests ours.
    """
    for optimizer in published.Muon, published.Muon.__base__, published.NorMuon:
        monkeypatch.setattr(
            sys.modules[optimizer.__module__],
            "zero_power_via_newton_schulz_5",
            lambda matrix, **_: orthogonalised([matrix])[0],
            raising=False,
        )
    model = layer(columns)
    group = {"params": list(model.parameters()), "use_muon": True, "weight_decay": 0.0}
    optimizer = getattr(published, name)([group], lr=RATE, momentum=0.95)
    expected = moves(model, optimizer, range(STEPS))
    rows = preconditioner == "normuon"
    grafting = AdamGrafting(normalize_rows=rows, momentum=0.95, max_trust_ratio=math.inf)
    found = ours(preconditioner, grafting, columns)
    for move, right in zip(found, expected):
        torch.testing.assert_close(move / move.norm(), right / right.norm(), rtol=0, atol=1e-6)
