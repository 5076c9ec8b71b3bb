"""Muon, a preconditioner without factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac import KFAC, AdamGrafting, Coverage, MemOpt, Refresh, Strategy, Transport
from mpikfac.lab import LocalSGD
from mpikfac.plan import LayerShape
from support import gradients, inside

STEPS, RATE, MOMENTUM = 20, 0.05, 0.9


def muon(model, comm, strategy=None, **choices):
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    grafting = AdamGrafting(momentum=MOMENTUM, max_trust_ratio=math.inf)
    choices = {"grafting": grafting} | choices
    return KFAC(model, sgd, comm, strategy, preconditioner="muon", **choices)


@pytest.mark.parametrize("kind", gradients.NETWORKS)
def test_muon_steps_as_the_formulas_do(comm, kind):
    """Oracle: singular values in numpy, with Muon's polynomial and momentum, for 20 steps."""
    momenta = gradients.Momenta(MOMENTUM)

    def direction(name, g):
        return gradients.polar(momenta(name, g))

    of_adams_length = gradients.OfAdamsLength(direction)
    expected = gradients.by_hand(kind, STEPS, of_adams_length, RATE)
    kfac = muon(gradients.network(kind), comm)
    gradients.train(kfac, kind, range(STEPS), comm)
    found, right = (nn.utils.parameters_to_vector(m.parameters()) for m in (kfac.model, expected))
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-9)


def test_muon_takes_momentum_of_gradients_by_default(comm):
    """Oracle: the defaults of Muon's authors."""
    model = gradients.network("linear")
    usual = KFAC(model, torch.optim.SGD(model.parameters(), lr=RATE), comm, preconditioner="muon")
    assert inside.settings(usual).grafting == AdamGrafting(momentum=0.95)


def test_nothing_is_kept_of_a_layer_but_the_lengths(comm):
    """Oracle: the plan's memory, and the names of the state."""
    kfac = muon(gradients.network("convolutional"), comm)
    gradients.train(kfac, "convolutional", range(2), comm)
    memory = kfac.plan.memory(0)
    empty = {"statistics", "averages", "bases", "denominators"}
    assert {kind for kind in empty if memory[kind]} == set()
    names = {name.split("/")[1] for name in kfac.state_dict() if name.startswith("kfac/")}
    assert names == {"graft", "momentum", "learned", "preconditioner"}


def test_owners_share_out_the_work_of_polar_products():
    """Oracle: the least largest load of two ranks, by hand: the wide layer against all others."""
    layers = [LayerShape("a", 64, 64), LayerShape("wide", 128, 96), LayerShape("b", 64, 64)]
    plan = mpikfac.make_plan(layers, 2, Strategy(MemOpt()), preconditioner="muon")
    assert plan.owners == {"a": 1, "wide": 0, "b": 1}
    updates = Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
    plan = mpikfac.make_plan(layers, 2, updates, preconditioner="muon")
    assert {name: plan.updaters[name] for name in ("a", "wide", "b")} == plan.owners
    stages = [message.stage for message in plan.messages(0, True, True, False)]
    assert stages == ["reduce gradients", "publish weights"]


@pytest.mark.parametrize(
    ("choices", "needs"),
    [
        ({"grafting": AdamGrafting(orthogonalize=False)}, "grafting.orthogonalize=True"),
        (
            {"strategy": Strategy(MemOpt(), transport=Transport(reduce_factors_at="inverses"))},
            "transport.reduce_factors_at='factors'",
        ),
        ({"strategy": Strategy(MemOpt(), sync=LocalSGD())}, "sync.local_steps=False"),
        ({"strategy": Strategy(MemOpt(), refresh=Refresh(stagger=2))}, "stagger=1"),
    ],
)
def test_choices_without_sense_are_refused(comm, choices, needs):
    """Oracle: the text of the error names the need."""
    with pytest.raises(ValueError, match="preconditioner='muon' needs .*") as refusal:
        muon(gradients.network("linear"), comm, **choices)
    assert needs in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_table_of_entries_is_left_out_by_name(comm):
    """Oracle: the text of the error; without the table, the step is Adam's for the table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    with pytest.raises(ValueError, match="of layer '0' needs diagonal='', .*with coverage="):
        muon(model, comm)
    kfac = muon(model, comm, coverage=Coverage(skip=["0"]))
    assert [layer.name for layer in kfac.plan.layers] == ["2"]
