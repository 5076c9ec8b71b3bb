"""Weights shared by different kinds of modules take Adam's step, and K-FAC covers the rest."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import Coverage, KFACOptimizer, NormClip, layers
from mpikfac.preconditioners import PRECONDITIONERS
from support import inside
from support.compiled import Problem, check

RATE, STEPS = 0.01, 5
WORDS = torch.randint(7, (8, 4), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """Predict words from the words themselves; a weight embeds words and is the head's, too."""

    def __init__(self, as_modules: bool = True, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.body = nn.Embedding(7, 5), nn.Linear(5, 5)
        if as_modules:
            self.head = nn.Linear(5, 7, bias)
            self.head.weight = self.wte.weight
            if bias:
                nn.init.zeros_(self.head.bias)
        else:
            self.bias = nn.Parameter(torch.zeros(7))
        self.norm, self.as_modules = nn.LayerNorm(5), as_modules
        self.double()

    def forward(self, x):
        x = self.norm(self.body(self.wte(x)).tanh())
        y = self.head(x) if self.as_modules else F.linear(x, self.wte.weight, self.bias)
        return y.transpose(1, 2)


def train(model, steps=STEPS, **settings):
    """Train by K-FAC; return the optimizer."""
    optimizer = KFACOptimizer(model, lr=RATE, **settings)
    descend(optimizer, model, range(steps))
    return optimizer


def descend(optimizer, call, steps):
    for step in steps:
        optimizer.zero_grad()
        words = WORDS.roll(step, 1)
        F.cross_entropy(call(words), words.roll(1, 0)).backward()
        optimizer.step()


def names(optimizer):
    return [layer.name for layer in inside.layers(optimizer.trainer)]


def parameters(model):
    return [p.detach() for p in (model.wte.weight, *model.body.parameters())]


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_tied_weight_trains_as_one_that_is_skipped(preconditioner):
    """Oracle: the bits of a model without the head's module, whose embedding is skipped by hand."""
    model, untied = Language(), Language(as_modules=False)
    before = parameters(Language())
    train(model, preconditioner=preconditioner)
    train(untied, preconditioner=preconditioner, coverage=Coverage(skip=["wte"]))
    for found, expected, start in zip(parameters(model), parameters(untied), before):
        assert torch.equal(found, expected)
        assert not torch.equal(found, start)
    assert torch.equal(model.head.bias, untied.bias)
    assert model.head.weight is model.wte.weight


def test_a_tied_weight_takes_adams_step():
    """Oracle: torch's Adam without momentum, on the gradients of the same steps."""
    model = Language()
    optimizer = KFACOptimizer(model, lr=RATE, momentum=0.0, weight_decay=0.0)
    twins = [nn.Parameter(p.detach().clone()) for p in (model.wte.weight, model.head.bias)]
    adam = torch.optim.Adam(twins, lr=RATE, betas=(0.0, 0.999))
    for step in range(STEPS):
        optimizer.zero_grad()
        words = WORDS.roll(step, 1)
        F.cross_entropy(model(words), words.roll(1, 0)).backward()
        for twin, parameter in zip(twins, (model.wte.weight, model.head.bias)):
            twin.grad = parameter.grad.clone()
        optimizer.step()
        adam.step()
        torch.testing.assert_close(model.wte.weight, twins[0])
        torch.testing.assert_close(model.head.bias, twins[1])


def test_a_line_at_the_start_names_the_modules(caplog):
    """Oracle: the lines; a model whose layers cover everything has none."""
    caplog.set_level(logging.INFO, "mpikfac")
    KFACOptimizer(Language())
    assert caplog.messages == [
        "K-FAC covers 30 of 82 weights; the rest is trained first-order",
        "trained first-order, because no layer covers them: Linear head (bias); "
        "LayerNorm norm (weight, bias)",
        "trained first-order, because no layer covers all modules that share them: "
        "wte.weight = head.weight",
    ]
    caplog.clear()
    KFACOptimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert caplog.messages == []


# -- coverage ------------------------------------------------------------------------------------


def sharing(*modules, shared=("weight",)):
    """Return modules with parameters of the first in common."""
    for module in modules[1:]:
        for name in shared:
            setattr(module, name, getattr(modules[0], name))
    return nn.Sequential(*modules, nn.Linear(2, 2))


def kept(model, own):
    """Return a model in which a container has a parameter, too."""
    model.append(nn.ParameterList([own]))
    return model


class Derived(nn.Embedding):
    """An embedding that may compute something else."""


def of_attention():
    """Return an attention whose output projection is a linear layer's, too."""
    model = sharing(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1] = nn.MultiheadAttention(2, 1)
    model[1].out_proj.weight = model[0].weight
    return model


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def twice(module):
    """Return a model with a module under two names."""
    return nn.Sequential(module, nn.Sequential(module), nn.Linear(2, 2))


WEIGHTS = ["0.weight", "1.weight"]
CASES = {
    "head with a bias": (
        *(sharing(nn.Embedding(3, 2), nn.Linear(2, 3)), []),
        *(["2"], {"0.weight": WEIGHTS, "1.bias": []}),
    ),
    "three modules, two of them alike": (
        *(sharing(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False), nn.Embedding(3, 2)), []),
        *(["3"], {"0.weight": [*WEIGHTS, "2.weight"]}),
    ),
    "a container": (
        *(kept(sharing(layer := nn.Linear(2, 2)), layer.weight), []),
        *(["1"], {"0.weight": ["0.weight", "2.0"], "0.bias": []}),
    ),
    "one of the modules skipped": (
        *(sharing(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)), ["1"]),
        *(["2"], {"0.weight": WEIGHTS}),
    ),
    "one of two alike modules skipped": (
        *(sharing(nn.Linear(2, 2), nn.Linear(2, 2), shared=("weight", "bias")), ["1"]),
        *(["2"], {"0.weight": WEIGHTS, "0.bias": ["0.bias", "1.bias"]}),
    ),
    "both skipped": (
        *(sharing(nn.Embedding(3, 2), nn.Linear(2, 3)), ["0", "1"]),
        *(["2"], {"0.weight": [], "1.bias": []}),
    ),
    "a class that is not covered": (
        *(sharing(Derived(3, 2), nn.Linear(2, 3, bias=False)), []),
        *(["2"], {"0.weight": WEIGHTS}),
    ),
    "another stride": (
        *(sharing(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2)), []),
        *(["2"], {"0.weight": WEIGHTS, "0.bias": [], "1.bias": []}),
    ),
    "only the bias": (
        *(sharing(nn.Linear(2, 2), nn.Linear(3, 2), shared=("bias",)), []),
        *(["2"], {"0.weight": [], "0.bias": ["0.bias", "1.bias"], "1.weight": []}),
    ),
    "inside an attention": (
        *(of_attention(), []),
        *(
            ["1.in_proj", "2"],
            {"0.weight": ["0.weight", "1.out_proj.weight"], "1.out_proj.bias": []},
        ),
    ),
    "a frozen bias": (
        *(frozen(sharing(nn.Embedding(3, 2), nn.Linear(2, 3)), "1.bias"), []),
        *(["2"], {"0.weight": WEIGHTS}),
    ),
    "a frozen weight": (
        *(frozen(sharing(nn.Embedding(3, 2), nn.Linear(2, 3)), "0.weight"), []),
        *(["1", "2"], {}),
    ),
    "a module under two names": (twice(nn.Linear(2, 2)), [], ["0", "2"], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_covered_beside_shared_parameters(case):
    """Oracle: covered layers, and uncovered parameters with their names in all modules, by hand."""
    model, skip, covered, uncovered = CASES[case]
    found, others = layers.cover(model, Coverage(skip))
    assert [layer.name for layer in found] == covered
    assert {other.name: list(other.ties) for other in others} == uncovered


def test_a_reason_beside_the_tie_is_refused():
    """Oracle: the message; its own remedy is enough."""
    model = sharing(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 3))
    with pytest.raises(layers.Refused, match="'0': Embedding with max_norm=1.0 is not") as error:
        layers.cover(model)
    assert list(error.value.reasons) == ["0"]
    assert [layer.name for layer in layers.cover(model, Coverage(["0"]))[0]] == ["2"]


def test_a_tied_derived_class_is_not_offered():
    """Oracle: covering the class would not cover the weight."""
    model = sharing(Derived(3, 2), nn.Linear(2, 3))
    assert layers.offers(model, layers.cover(model)[1]) == []
    untied = nn.Sequential(Derived(3, 2), nn.Linear(2, 3))
    assert len(layers.offers(untied, layers.cover(untied)[1])) == 1


# -- a run ---------------------------------------------------------------------------------------


def test_a_model_of_nothing_else_trains():
    """Oracle: torch's Adam without momentum."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)).double()
    model[1].weight = model[0].weight
    twin = nn.Parameter(model[0].weight.detach().clone())
    optimizer = KFACOptimizer(model, lr=RATE, momentum=0.0, weight_decay=0.0)
    F.cross_entropy(model(WORDS[:, 0]), WORDS[:, 1]).backward()
    twin.grad = model[0].weight.grad.clone()
    optimizer.step()
    torch.optim.Adam([twin], lr=RATE).step()
    torch.testing.assert_close(model[0].weight, twin)


def test_a_state_resumes():
    """Oracle: the bits of a run without a break."""
    whole, model = Language(), Language()
    train(whole, steps=2 * STEPS)
    first = train(model)
    file = io.BytesIO()
    torch.save((model.state_dict(), first.state_dict()), file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file)
    model = Language()
    model.load_state_dict(of_model)
    second = KFACOptimizer(model, lr=RATE)
    second.load_state_dict(of_optimizer)
    descend(second, model, range(STEPS, 2 * STEPS))
    for found, expected in zip(model.parameters(), whole.parameters()):
        assert torch.equal(found, expected)


@pytest.mark.gate
def test_a_compiled_model_trains_as_it_is():
    """Oracle: the model without a compiler; a compiler that makes its own graphs."""
    plain, compiled = Language(), Language()
    train(plain)
    train(torch.compile(compiled, backend="eager"))
    for found, expected in zip(compiled.parameters(), plain.parameters()):
        assert torch.equal(found, expected)
    labels = WORDS.roll(1, 0)
    check(Problem(lambda: Language().float(), WORDS, labels), "eager")


def test_a_weight_may_be_tied_and_thawed_between_steps():
    """Oracle: the layers of a new trainer, and finite weights that move."""
    model = Language()
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())
    optimizer = train(model)
    assert names(optimizer) == ["wte", "body", "head"]
    model.head.weight = model.wte.weight
    descend(optimizer, model, range(2))
    assert names(optimizer) == ["body"]
    model.wte.weight.requires_grad_(False)
    descend(optimizer, model, range(2))
    assert names(optimizer) == ["body", "head"]
    model.wte.weight.requires_grad_(True)
    before = model.wte.weight.detach().clone()
    descend(optimizer, model, range(2))
    assert names(optimizer) == ["body"]
    assert not torch.equal(model.wte.weight, before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# -- remedies ------------------------------------------------------------------------------------


def pasted(text):
    """Return the coverage that a message tells to paste."""
    (line,) = re.findall(r"coverage=(mpikfac\.Coverage\(skip=\[[^]]*\]\))", text)
    return eval(line, {"mpikfac": mpikfac})


def test_the_remedy_of_a_refusal_can_be_pasted():
    """Oracle: the model trains with the line; what was skipped before stays skipped."""
    model = nn.Sequential(nn.Embedding(7, 5, max_norm=1.0), nn.Linear(5, 7), nn.Linear(7, 7))
    with pytest.raises(layers.Refused) as error:
        KFACOptimizer(model, coverage=Coverage(skip=["2"]))
    coverage = pasted(str(error.value))
    assert coverage.skip == ["2", "0"]
    assert names(KFACOptimizer(model, coverage=coverage)) == ["1"]


def test_the_remedy_of_a_layer_outside_of_the_optimizer_can_be_pasted():
    """Oracle: the line, by hand."""
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
    params = [*model[0].parameters(), model[1].out_proj.bias]
    with pytest.raises(
        ValueError, match="layer '1.in_proj' is covered, but the optimizer lacks"
    ) as error:
        KFACOptimizer(model, params=params)
    coverage = pasted(str(error.value))
    assert coverage.skip == ["1"]
    assert names(KFACOptimizer(model, params=params, coverage=coverage)) == ["0"]


def test_the_remedy_of_an_unseen_layer_can_be_pasted(caplog):
    """Oracle: the line, by hand; the module of a layer inside a module."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 4), attention)
    optimizer = KFACOptimizer(model, clip=NormClip(max_norm=1.0), momentum=0.0)
    x = torch.randn(3, 2, 4)
    (model[0](x).sum() + F.linear(x, attention.out_proj.weight).square().sum()).backward()
    optimizer.step()
    assert "layer '1.out_proj' has a gradient, but K-FAC recorded no call" in caplog.text
    coverage = pasted(caplog.text)
    assert coverage.skip == ["1"]
    assert names(KFACOptimizer(model, coverage=coverage)) == ["0"]
