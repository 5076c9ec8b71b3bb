from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import mpikfac
from mpikfac import LayerShape, layers
from mpikfac.layers.convolution import moments
from mpikfac.numerics import copy_all

VOTES = ("(votes)", (layers.VOTES,))


def covered(model, **options):
    return [layer.name for layer in layers.cover(model, layers.Coverage(**options))[0]]


def others(model, **options):
    return [other.name for other in layers.cover(model, layers.Coverage(**options))[1]]


def vectors(module, x):
    """Return all `a` `[vectors, inputs]`: derivatives of every output by weight and bias."""
    weights = [p for p in (module.weight, module.bias) if p is not None]

    def first_channel(*given):
        named = dict(zip(("weight", "bias"), given))
        return torch.func.functional_call(module, named, x)[:, 0].reshape(-1)

    jacobians = torch.autograd.functional.jacobian(first_channel, tuple(weights))
    return torch.cat([j[:, 0].reshape(len(j), -1) for j in jacobians], 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel_size": 3},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 3)},
        {"kernel_size": 3, "padding": "valid"},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": (4, 2), "padding": "same"},
        {"kernel_size": (2, 3), "padding": "same", "dilation": 3},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": 4, "padding": "same", "padding_mode": "reflect"},
        {"kernel_size": 3, "padding": (2, 0), "padding_mode": "replicate", "stride": 2},
        {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
        {"kernel_size": (2, 4), "padding": "same", "padding_mode": "circular"},
    ],
    ids=str,
)
@pytest.mark.parametrize("correlates", [True, False])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_inputs_of_a_convolution_are_what_its_weight_multiplies(
    monkeypatch, geometry, correlates, bias
):
    """Oracle: autograd's derivative of the module's output by the weight."""
    monkeypatch.setattr(moments, "worth_correlating", lambda *_: correlates)
    torch.manual_seed(0)
    module = nn.Conv2d(3, 2, bias=bias, **geometry).double()
    x = torch.randn(2, 3, 6, 7).double()
    a = vectors(module, x)
    layer = layers.ConvLayer("conv", module)
    y = module(x)
    image = layer.prepared(x, y)
    torch.testing.assert_close(layer.input_sum(image), a.T @ a, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.input_vector(image), a.sum(0), rtol=1e-10, atol=1e-10)
    assert layer.positions(y) == len(a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make", [lambda b: nn.Linear(3, 4, b), lambda b: nn.Conv2d(2, 4, 3, bias=b)]
)
def test_gradients_and_weights_as_matrices(make, bias):
    """Oracle: weight and bias side by side, the bias last."""
    module = make(bias)
    (layer,), _ = layers.cover(nn.Sequential(module))
    shape = layer.shape.outputs, layer.shape.inputs
    parts = [module.weight.detach().flatten(1)] + ([module.bias.detach()[:, None]] if bias else [])
    expected, matrix = torch.cat(parts, 1), torch.empty(shape)
    copy_all(layer.values_to(layer.parts(matrix)))
    assert torch.equal(matrix, expected)

    copy_all(layer.gradients_to(layer.parts(matrix)))
    assert not matrix.any()  # no gradient yet
    gradient = torch.randn(shape)
    copy_all(layer.gradients_from(layer.parts(gradient)))
    copy_all(layer.gradients_to(layer.parts(matrix)))
    assert torch.equal(matrix, gradient)
    assert torch.equal(module.weight.grad.flatten(1), gradient[:, : shape[1] - bias])
    assert not bias or torch.equal(module.bias.grad, gradient[:, -1])

    copy_all(layer.values_from(layer.parts(2 * expected)))
    copy_all(layer.values_to(layer.parts(matrix)))
    assert torch.equal(matrix, 2 * expected)


def test_orders_of_factors():
    """Oracle: channels times kernel, and 1 for the bias."""
    model = nn.Sequential(nn.Conv2d(3, 8, (3, 5)), nn.Linear(7, 4, bias=False))
    shapes, rest = layers.covered_shapes(model)
    assert shapes == [LayerShape("0", 46, 8), LayerShape("1", 7, 4)]
    assert rest == [VOTES]
    assert layers.covered_shapes(model, layers.Coverage(["0"]))[1] == [
        ("0.weight", (8, 3, 3, 5)),
        ("0.bias", (8,)),
        VOTES,
    ]


def test_what_is_frozen_is_neither_covered_nor_trained():
    """Oracle: a frozen bias is no coordinate; with a frozen weight, the bias is a layer alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    model[0].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    shapes = [LayerShape("0", 3, 4), LayerShape("1", 1, 5, sides="G")]
    assert layers.covered_shapes(model) == (shapes, [VOTES])


class Subclass(nn.Linear):
    """A layer with an unknown computation."""


def test_everything_else_is_trained_as_it_is():
    """Oracle: parameters, then floating buffers, in model order."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), Subclass(2, 2, bias=False))
    names = ["0.weight", "0.bias", "2.weight", "0.running_mean", "0.running_var"]
    assert (covered(model), others(model)) == (["1"], names)


class Loud(nn.Linear):
    """A layer that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def offered(model, coverage=None):
    _, others = layers.cover(model, coverage)
    return layers.offers(model, others, coverage)


def test_a_class_that_computes_as_a_covered_class_is_offered():
    """Oracle: the classes by hand; the offered line covers the modules."""
    model = nn.Sequential(*(kind(2, 2) for kind in (Subclass, Loud, Subclass, Subclass)))
    parametrize.register_parametrization(model[3], "weight", nn.Tanh())
    model.append(nn.MultiheadAttention(2, 1))
    (line,) = offered(model)
    assert "trained first-order, because Subclass is a derived class: 0, 2; coverage=" in line
    chosen = re.search(r"coverage=(.*) covers Subclass$", line)[1]
    coverage = eval(chosen, {"mpikfac": mpikfac, "torch": torch, "Subclass": Subclass})
    assert [layer.name for layer in layers.cover(model, coverage)[0]][:2] == ["0", "2"]
    assert offered(model, coverage) == []
    assert offered(model, layers.Coverage(skip=["0", "2"])) == []
    assert offered(model, layers.Coverage(["0", "2"], {nn.Linear: layers.Layer})) == []


def test_skip_takes_a_module_and_all_in_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), *[nn.Linear(2, 2)] * 10)
    model = nn.ModuleDict({"body": model[0], "body2": nn.Linear(2, 2)})
    assert covered(model) == ["body.0", "body.1", "body2"]
    assert covered(model, skip=["body"]) == ["body2"]
    assert covered(model, skip=["body.1", "body2"]) == ["body.0"]


def twins():
    """Return a model with two equal modules that share all parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    return model


def test_modules_that_share_their_parameters_are_one_layer():
    """Oracle: the modules."""
    model = twins()
    first, second = layers.cover(model)[0]
    assert (first.name, first.modules) == ("0", [model[0], model[2]])
    assert (second.name, second.modules) == ("1", [model[1]])


@pytest.mark.parametrize(
    ("model", "skip", "text"),
    [
        (
            nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
            [],
            "layer '0': Embedding with max_norm=1.0 is not covered; for first-order training, pass "
            "coverage=mpikfac.Coverage(skip=['0'])",
        ),
        (nn.ModuleDict({"conv1": nn.Linear(2, 2)}), ["conv2"], "did you mean 'conv1'?"),
        (nn.Sequential(nn.Linear(2, 2)), ["head"], "skip names 'head', which is not a module"),
    ],
)
def test_what_cannot_be_covered_is_refused_by_name(model, skip, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        layers.cover(model, layers.Coverage(skip))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_that_are_computed_in_every_pass_are_refused():
    """Oracle: the modules; the model is accepted if the named modules are skipped."""
    model = nn.Sequential(
        *(nn.utils.weight_norm(nn.Linear(2, 2)) for _ in range(2)),
        prune.identity(nn.Conv1d(2, 2, 1), "weight"),
        nn.utils.spectral_norm(nn.Conv1d(2, 2, 1)),
        *(nn.Linear(2, 2), nn.Embedding(4, 4, max_norm=1.0)),
    )
    text = (
        "layers '0', '1', '2' and '3': the weight is computed in every pass, as by weight_norm, "
        "spectral_norm or prune, which is not covered; layer '5': Embedding with max_norm=1.0 is "
        "not covered; for first-order training, pass "
        "coverage=mpikfac.Coverage(skip=['0', '1', '2', '3', '5'])"
    )
    with pytest.raises(layers.Refused, match=re.escape(text)):
        layers.cover(model)
    assert covered(model, skip=["0", "1", "2", "3", "5"]) == ["4"]


def test_what_was_refused_may_be_skipped():
    """Oracle: the parameters are trained first-order."""
    assert others(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), skip=["0"]) == ["0.weight"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 63, 1000])
def test_a_rank_that_differs_is_heard_among_many(ranks):
    """Oracle: the given values; means in float32, added rank by rank, as a ring adds."""
    votes = layers.Votes(torch.float32, torch.device("cpu"))

    def alike(values):
        mean = torch.zeros_like(votes.tensor)
        for value in values:
            votes.mark(value, False)
            mean += votes.tensor / ranks
        votes.tensor.copy_(mean)
        return votes.read() == (False, True)

    assert all(alike([value] * ranks) for value in (0.1, 0.2, 0.3))
    if ranks > 1:
        assert not alike([0.1] * (ranks - 1) + [0.2])


class Shifted(layers.Layer):
    """A layer of a user, whose vectors are not the input and the gradient."""

    def inputs(self, x):
        return super().inputs(x / 3 + 1)

    def outputs(self, g):
        return super().outputs(2 * g)


def changed(**changes):
    """Return a layer of 5 inputs and 3 outputs with a changed shape."""
    layer = layers.Layer("head", nn.Linear(5, 3))
    layer.shape = replace(layer.shape, **changes)
    return layer


def convolution(groups):
    """Return the layer of a convolution from 4 to 8 channels."""
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3, groups=groups)})
    return layers.cover(model)[0][0]


@pytest.mark.parametrize("side", ["A", "G"])
def test_a_diagonal_is_of_the_vectors_of_a_layer_of_ones_own(side):
    """Oracle: the diagonal of the whole factor."""
    layer, x, g = Shifted("own", nn.Linear(5, 3)), torch.randn(7, 5), torch.randn(7, 3)
    whole = layer.second_moment(side, x, g)
    layer.shape = replace(layer.shape, diagonal=side)
    found = layer.second_moment(side, x, g)
    torch.testing.assert_close(found.flatten(), whole.diagonal())


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (layers.Layer("head", nn.Linear(5, 3)), "Layer('head', Linear, A 6x6, G 3x3)"),
        (Shifted("own", nn.Linear(5, 3, bias=False)), "Shifted('own', Linear, A 5x5, G 3x3)"),
        (convolution(groups=2), "ConvLayer('conv', Conv2d, A 2 of 19x19, G 2 of 4x4)"),
        (changed(largest=3), "Layer('head', Linear, A 2 of 3x3, G 3x3)"),
        (changed(diagonal="A"), "Layer('head', Linear, A diagonal of 6, G 3x3)"),
        (changed(sides="A"), "Layer('head', Linear, A 6x6)"),
    ],
)
def test_a_layer_is_shown_on_a_line(layer, told):
    """Oracle: orders by hand: inputs and the bias, and outputs."""
    assert repr(layer) == told
