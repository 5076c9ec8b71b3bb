"""NorMuon, a preconditioner without factors whose directions have rows of about equal length."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import KFAC, AdamGrafting, MemOpt, Refresh, Strategy
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
    grafting = AdamGrafting(normalize_rows=True, momentum=MOMENTUM, max_trust_ratio=math.inf)
    choices = {"grafting": grafting} | choices
    return KFAC(model, sgd, comm, strategy, preconditioner="normuon", **choices)


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
    usual = KFAC(
        model, torch.optim.SGD(model.parameters(), lr=RATE), comm, preconditioner="normuon"
    )
    assert inside.settings(usual).grafting == AdamGrafting(normalize_rows=True, momentum=0.95)


def test_a_gradient_that_is_not_finite_stays_out_of_the_averages(comm):
    """Oracle: the state before; the other layer's averages of rows change."""
    model = gradients.network("linear")
    kfac = normuon(model, comm)
    gradients.train(kfac, "linear", range(2), comm)
    before = copy.deepcopy(kfac.state_dict())
    kfac.optimizer.zero_grad()
    inputs, labels = gradients.batch("linear", 2)
    F.cross_entropy(model(inputs), labels).backward()
    model[0].weight.grad[0, 0] = torch.nan
    kfac.step()
    now = kfac.state_dict()
    same = [torch.equal(now[name], before[name]) for name in ("kfac/rows/0", "kfac/rows/2")]
    assert same == [True, False]


def test_rows_without_a_gradient_do_not_move(comm):
    """Oracle: by hand: the second output has no gradient; the other rows move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    before = model[0].weight.detach().clone()
    kfac = normuon(model, comm)
    model(torch.ones(2, 4).double())[:, ::2].square().sum().backward()
    kfac.step()
    moved = (model[0].weight.detach() != before).any(1)
    assert moved.tolist() == [True, False, True]


@pytest.mark.parametrize("preconditioner", ["inverse", "eigen", "newton-muon"])
def test_directions_of_kfac_have_rows_of_equal_lengths_at_first(comm, preconditioner):
    """Oracle: by hand: the first average of a row is a share of the row's own mean square."""
    model = gradients.network("linear")
    before = gradients.stacked(list(model[0].parameters()), 1)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    kfac = KFAC(
        model,
        sgd,
        comm,
        preconditioner=preconditioner,
        grafting=AdamGrafting(normalize_rows=True, max_trust_ratio=math.inf),
    )
    gradients.train(kfac, "linear", range(1), comm)
    moves = gradients.stacked(list(model[0].parameters()), 1)[0] - before[0]
    rows = np.linalg.norm(moves, axis=1)
    np.testing.assert_allclose(rows, rows.mean(), rtol=1e-8)


@pytest.mark.parametrize(
    ("choices", "needs"),
    [
        ({"grafting": AdamGrafting()}, "needs grafting.normalize_rows=True, not False"),
        (
            {"strategy": Strategy(MemOpt(), refresh=Refresh(staleness=1))},
            "needs refresh.staleness=0, not 1",
        ),
    ],
)
def test_choices_without_sense_are_refused(comm, choices, needs):
    """Oracle: the text of the error names the need."""
    model, usual = (
        gradients.network("linear"),
        {"preconditioner": "normuon", "grafting": AdamGrafting(normalize_rows=True)},
    )
    with pytest.raises(ValueError, match=needs) as refusal:
        KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, **usual | choices)
    assert "\n" not in str(refusal.value)


def test_nothing_is_kept_of_a_layer_but_lengths_and_rows(comm):
    """Oracle: the names and shapes of the state; groups have rows of their own."""
    kfac = normuon(gradients.network("convolutional"), comm)
    gradients.train(kfac, "convolutional", range(1), comm)
    rows = {n: tuple(x.shape) for n, x in kfac.state_dict().items() if n.startswith("kfac/rows/")}
    assert rows == {"kfac/rows/0": (2, 2), "kfac/rows/2": (3,), "kfac/rows/4": (3,)}
