"""NorMuon, a solver without factors whose directions have rows of about equal lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from mpikfac import KFAC, Length
from support import gradients, inside

STEPS, RATE, MOMENTUM = 20, 0.05, 0.9


class Rows:
    """The rows of matrices, by name, over the roots of running averages of their mean squares."""

    def __init__(self) -> None:
        self.squares = {}

    def __call__(self, name: str, polar: np.ndarray) -> np.ndarray:
        squares = (polar**2).mean(1)
        self.squares[name] = 0.95 * self.squares.get(name, 0) + 0.05 * squares
        return polar / (np.sqrt(self.squares[name]) + 1e-10)[:, None]


def normuon(model, comm, strategy=None, **choices):
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    length = Length("rows", momentum=MOMENTUM, trust=math.inf)
    return KFAC(model, sgd, comm, strategy, solver="normuon", **{"length": length} | choices)


@pytest.mark.parametrize("kind", gradients.NETWORKS)
def test_normuon_steps_as_the_formulas_do(comm, kind):
    """Oracle: singular values in numpy, with Muon's polynomial and averages of rows, 20 steps."""
    momenta, rows = gradients.Momenta(MOMENTUM), Rows()

    def direction(name, g):
        return rows(name, gradients.polar(momenta(name, g)))

    expected = gradients.by_hand(kind, STEPS, gradients.OfAdamsLength(direction), RATE)
    kfac = normuon(gradients.network(kind), comm)
    gradients.train(kfac, kind, range(STEPS), comm)
    found, right = (nn.utils.parameters_to_vector(m.parameters()) for m in (kfac.model, expected))
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-9)


def test_normuon_takes_momentum_of_gradients_by_default(comm):
    """Oracle: the defaults of NorMuon's authors."""
    model = gradients.network("linear")
    usual = KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, solver="normuon")
    assert inside.settings(usual).length == Length("rows", momentum=0.95)
