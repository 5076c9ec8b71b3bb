"""A rule that selects different preconditioners for the layers of a network."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import CommOpt, LayerShape, MemOpt, Refresh, Strategy, Transport, make_plan
from support import inside, problem

LAYERS = "0", "3", "5"
MIXTURES = [
    ("eigen", "inverse", "eva"),
    ("ekfac", "eva", "inverse"),
    ("eva", "ekfac", "eigen"),
    ("inverse", "ekfac", "eigen"),
]
mixtures = pytest.mark.parametrize("mixture", MIXTURES, ids=" ".join)


def rule_of(preconditioners):
    """Return the rule that gives layers their preconditioners, by layer name."""
    return lambda layer: dataclasses.replace(layer, preconditioner=preconditioners.get(layer.name))


def trainer(comm, preconditioner, preconditioners=None, strategy=None, **settings):
    model = problem.network()
    settings = problem.SETTINGS | {"kl_clip": None, "preconditioner": preconditioner} | settings
    return problem.kfac(
        model, problem.sgd(model), comm, strategy, rule=rule_of(preconditioners or {}), **settings
    )


def direction(kfac, step):
    """Return the directions of a batch's gradients, by layer; keep the weights."""
    images, labels = problem.batch(step)
    kfac.optimizer.zero_grad()
    F.cross_entropy(kfac.model(images), labels).backward()
    kfac.precondition()
    return {layer.name: [p.grad.clone() for p in layer.parameters] for layer in inside.layers(kfac)}


@mixtures
@pytest.mark.parametrize("settings", [{}, {"inv_update_steps": 1}], ids=["", "anew"])
def test_a_layer_has_the_directions_of_the_run_with_its_preconditioner_for_all(
    comm, mixture, settings
):
    """Oracle: runs with one preconditioner and equal weights, to the last bit, at all steps."""
    mixed = trainer(comm, mixture[0], dict(zip(LAYERS, mixture)), **settings)
    pure = {preconditioner: trainer(comm, preconditioner, **settings) for preconditioner in mixture}
    for step in range(5):
        expected = {preconditioner: direction(kfac, step) for preconditioner, kfac in pure.items()}
        found = direction(mixed, step)
        for name, preconditioner in zip(LAYERS, mixture):
            assert all(map(torch.equal, found[name], expected[preconditioner][name])), (step, name)


@mixtures
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_goes_on_between_decompositions_to_the_last_bit(comm, mixture, stop):
    """Oracle: the uninterrupted run; decompositions of steps 0 and 3 are used one step later."""
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=1))
    first, second = (
        trainer(comm, "eigen", dict(zip(LAYERS, mixture)), strategy, inv_update_steps=3)
        for _ in range(2)
    )
    problem.run(first, comm, range(stop))
    state = first.state_dict()
    assert not first.missing(state)
    second.load_state_dict(copy.deepcopy(state))
    expected = problem.run(first, comm, range(stop, 8))
    assert torch.equal(problem.run(second, comm, range(stop, 8)), expected)


def test_a_state_says_which_layers_have_another_preconditioner_than_the_run(comm):
    """Oracle: by hand; without different layers, the state holds the run's preconditioner alone."""

    def said(preconditioner, preconditioners):
        kfac = trainer(comm, preconditioner, preconditioners)
        problem.run(kfac, comm, [0])
        return kfac.state_dict()["kfac/preconditioner"]

    assert said("eigen", {}) == said("eigen", dict.fromkeys(LAYERS, "eigen")) == "eigen"
    assert said("eigen", {"5": "eva", "0": "inverse"}) == "eigen, 0: inverse, 5: eva"


@pytest.mark.parametrize("preconditioners", [{"5": "inverse"}, {}], ids=["another", "none"])
def test_another_combination_makes_its_own_decompositions_of_loaded_factors(comm, preconditioners):
    """Oracle: the saved averages, without a new batch; a run with the new ones throughout."""
    first = trainer(comm, "eigen", {"3": "inverse"})
    problem.run(first, comm, range(2))
    state = first.state_dict()
    rarely = {"factor_update_steps": 100, "inv_update_steps": 100}
    second = trainer(comm, "eigen", preconditioners, **rarely)
    second.load_state_dict(state)
    assert "kfac/preconditioner" not in second.state_dict()
    found = direction(second, 2)
    assert second.trace.calls["statistics"] == 0
    assert torch.equal(inside.factors(second).flat, inside.factors(first).flat)
    state = {name: value for name, value in state.items() if name != "kfac/preconditioner"}
    for name, preconditioner in {**dict.fromkeys(LAYERS, "eigen"), **preconditioners}.items():
        alone = trainer(comm, preconditioner, **rarely)
        alone.load_state_dict(state)
        assert all(map(torch.equal, found[name], direction(alone, 2)[name]))


@pytest.mark.parametrize("towards", ["eigen", "eva"])
def test_averages_of_another_form_are_left_where_they_are(comm, towards):
    """Oracle: averages of the same form, as saved; for the new form, the new batch's average."""
    preconditioners = {} if towards == "eigen" else {"5": "eva"}
    first = trainer(comm, "eigen", {"5": "eva"} if towards == "eigen" else {})
    problem.run(first, comm, range(2))
    rarely = {"factor_update_steps": 100, "inv_update_steps": 100}
    second, fresh = (trainer(comm, "eigen", preconditioners, **rarely) for _ in range(2))
    second.load_state_dict(first.state_dict())
    fresh.model.load_state_dict(first.model.state_dict())
    kept = {name for name in inside.factors(second) if name.startswith(("0.", "3."))}
    for name in kept:
        assert torch.equal(inside.factors(second)[name], inside.factors(first)[name])
    for kfac in (second, fresh):
        direction(kfac, 2)
    for name in inside.factors(second).keys() - kept:
        torch.testing.assert_close(inside.factors(second)[name], inside.factors(fresh)[name])
    calls = second.trace.calls["statistics"]
    assert calls > 0
    direction(second, 3)
    assert second.trace.calls["statistics"] == calls


@mixtures
def test_a_losss_scale_is_taken_out_of_each_form_of_factors(comm, mixture):
    """Oracle: the run without a scale, to the last bit: the scale is a power of two."""
    plain, scaled = (trainer(comm, "eigen", dict(zip(LAYERS, mixture))) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    expected = problem.run(plain, comm, range(4))
    for step in range(4):
        images, labels = problem.batch(step)
        scaled.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(scaled.model(images), labels)).backward()
        scaled.step(scaler)
    assert torch.equal(problem.state(scaled.model), expected)


def test_a_lost_average_is_no_other_form(comm):
    """Oracle: a single line that names the lost average."""
    kfac = trainer(comm, "eigen", {"5": "eva"})
    problem.run(kfac, comm, [0])
    state = kfac.state_dict()
    for name in ("kfac/vectors/5.A", "kfac/factors/0.G"):
        lost = {item: value for item, value in state.items() if item != name}
        assert kfac.missing(lost) == {name}
        with pytest.raises(mpikfac.UserError, match=re.escape(name)):
            kfac.load_state_dict(lost)


@pytest.mark.parametrize(
    ("preconditioner", "settings", "text"),
    [
        (
            "svd",
            {},
            "layer '3': preconditioner='svd' must be one of None, 'eigen', 'ekfac', 'inverse'",
        ),
        (
            "eva",
            {"relative_damping": True},
            "preconditioner='eva' of layer '3' needs relative=False, not True",
        ),
        (
            "eva",
            {"fisher_type": "mc"},
            "preconditioner='eva' of layer '3' needs fisher_type='empirical' or 'forward-only'",
        ),
        (
            "eva",
            {"initial_factor": "identity"},
            "preconditioner='eva' of layer '3' needs initial_factor='first', not 'identity'",
        ),
        (
            "eva",
            {"strategy": Strategy(MemOpt(), transport=Transport(packing="square"))},
            "preconditioner='eva' of layer '3' needs transport.packing='triangle', not 'square'",
        ),
        (
            "ekfac",
            {"fisher_type": "forward-only"},
            "preconditioner='ekfac' of layer '3' needs fisher_type='empirical' or 'mc' or 'type-2'",
        ),
        (
            "ekfac",
            {"strategy": Strategy(MemOpt(), transport=Transport(overlap=True))},
            "preconditioner='ekfac' of layer '3' needs transport.overlap=False, not True",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_the_layers_name(comm, preconditioner, settings, text):
    """Oracle: the message of the run's preconditioner, and the layer."""
    with pytest.raises(ValueError, match=re.escape(text)):
        trainer(comm, "eigen", {"3": preconditioner}, **settings)


def test_what_no_layer_has_is_not_refused(comm):
    """Oracle: the rule gives all layers another preconditioner than the run's."""
    kfac = trainer(comm, "eva", dict.fromkeys(LAYERS, "eigen"), relative_damping=True)
    problem.run(kfac, comm, range(2))
    assert kfac.trace.calls["decompositions"] == 6


def test_plans_by_the_preconditioners_of_layers():
    """Oracle: by hand, of orders 10 and 4, 8 and 8, 6 and 2."""
    layers = [
        LayerShape("conv", 10, 4),
        LayerShape("fc", 8, 8, preconditioner="eva"),
        LayerShape("out", 6, 2, preconditioner="inverse"),
    ]
    plan = make_plan(layers, 2, Strategy(CommOpt()), preconditioner="eigen")
    assert plan.of(0).layouts.statistics.shapes["fc.A"] == (8,)
    factors = [plan.factors[name] for name in ("conv.G", "fc.G", "out.G")]
    assert [(block.name, block.shape) for factor in factors for block in factor.blocks] == [
        *(("conv.G.vectors", (4, 4)), ("conv.G.values", (4,))),
        *(("fc.G.vector", (8,)), ("out.G.inverse", (2, 2))),
    ]
    assert [name for name, factor in plan.factors.items() if factor.replicated] == ["fc.A", "fc.G"]
    loads = sorted(map(plan.load, (0, 1)))
    assert loads == [6**3 + 2**3, 10**3 + 4**3]  # fc has no work, but 16 elements
    assert len(set(plan.owners.values())) == 2
    assert list(plan.of(0).layouts.denominators.shapes) == ["conv"]
    damped = {
        name: factor.damping
        for name, factor in plan.factors.items()
        if factor.preconditioner.damped
    }
    assert damped == {"out.A": (), "out.G": ()}
    apart = Strategy(MemOpt(colocate_factors=False, factor_reduction="reduce_scatter"))
    with pytest.raises(
        ValueError,
        match="preconditioner='inverse' of layer 'out' needs assignment.colocate_factors=True",
    ):
        make_plan(layers, 2, apart, preconditioner="eigen")
    low = dataclasses.replace(layers[2], rank=2)
    with pytest.raises(ValueError, match="layer 'out' needs preconditioner='eigen', not 'inverse'"):
        make_plan([low], 2, Strategy(CommOpt()), preconditioner="eigen")
    make_plan(
        [dataclasses.replace(low, preconditioner="eigen")],
        2,
        Strategy(CommOpt()),
        preconditioner="inverse",
    )
