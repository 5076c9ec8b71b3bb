"""Values with derivatives along directions: rules, whole models, hooks, and what is refused."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import mpikfac
from mpikfac.lab import Jet, jet

pytestmark = pytest.mark.lab

POINTS, INPUTS = 7, 3
MATRIX = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
BIAS = torch.tensor([0.5, -2.0], dtype=torch.float64)
EACH = torch.linspace(1, 2, POINTS, dtype=torch.float64)
FUNCTIONS = {
    "linear": lambda x: F.linear(x, MATRIX, BIAS),
    "linear without bias": lambda x: F.linear(x, MATRIX),
    "matmul": lambda x: x @ MATRIX.T,
    "linear of three dimensions": lambda x: F.linear(torch.stack([x, x * x], 1), MATRIX, BIAS),
    "sum of jets": lambda x: x + torch.sin(x),
    "constants": lambda x: 2 + x - MATRIX[0] + EACH[:, None] - (x - 3.0) + (1 - x),
    "scaled sums": lambda x: torch.add(x, x * x, alpha=3) + torch.sub(x, torch.cos(x), alpha=2),
    "constant first": lambda x: torch.add(MATRIX[0], x * x, alpha=3) - torch.rsub(x, 2),
    "more features": lambda x: x[:, :1] + MATRIX[0],
    "negation": lambda x: -x * 3 + torch.neg(x),
    "product": lambda x: x * torch.exp(x) * MATRIX[0] * EACH[:, None] * 0.5,
    "division": lambda x: x / 3 + x / MATRIX[0, 2] + torch.div(x, EACH[:, None]),
    "division by a jet": lambda x: torch.sin(x) / (2 + x) + 1 / (2 + x) + EACH[:, None] / (2 + x),
    "cat": lambda x: torch.cat([x, torch.sin(x), EACH[:, None]], -1),
    "stack": lambda x: torch.stack([x, x * x], dim=2).sum(-1),
    "stack without features": lambda x: torch.stack([x[:, 0], x[:, 1] ** 2, EACH], -1),
    "indexing": lambda x: x[:, 1:] * x[..., :1] + x[:, [0, 2]] * x[:, None, 1],
    "reductions": lambda x: x.square().mean(1, keepdim=True) + x.sum(-1).unsqueeze(-1),
    "squeeze": lambda x: torch.stack([x[:, :1].squeeze(-1), x[:, 2].unsqueeze(1)[:, 0]], 1),
    "split": lambda x: torch.split(x, [1, 2], dim=1)[1] * x.split(1, 1)[0] - x.chunk(3, dim=-1)[1],
    "unbind": lambda x: torch.stack(torch.unbind(x, 1)[:2], 1) + torch.stack(x.unbind(-1)[1:], 1),
    "several dimensions": lambda x: x[:, None].sum((1, 2), True)[..., 0] + x.mean([1], True),
    "sum along an axis": lambda x: x.sum(axis=1, keepdim=True) * x[:, torch.tensor(1), None],
    "new dimensions": lambda x: torch.cat([x[:, 0][..., None], x[..., 0, None]], 1),
    "index tensors": lambda x: x[:, torch.tensor([2, 0])] + x[..., torch.arange(3) > 0],
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "numbers of numpy": lambda x: np.sqrt(2) * x + np.float32(3) - x / np.float64(2),
    "log": lambda x: torch.log(x * x + 1),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "tanh": torch.tanh,
    "tanh method": lambda x: x.tanh(),
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softplus of large values": lambda x: F.softplus(30 * x, beta=2, threshold=5),
    "square": torch.square,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: torch.reciprocal(x + 2),
    "root": lambda x: torch.pow(x + 2, 0.5),
    "powers of zero": lambda x: (x * 0) ** 2 + (x * 0) ** 1 + (x * 0) ** 0,
}


class Residual(nn.Module):
    """A network with a plain Python forward: a skip connection, products, and features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.activation = nn.SiLU()

    def forward(self, x):
        h = torch.tanh(self.first(torch.cat([x, torch.sin(math.pi * x[:, :2])], 1)))
        h = h + 0.5 * self.activation(self.second(h))
        return self.last(h) * x[:, :1]


def points() -> Tensor:
    return torch.randn(POINTS, INPUTS, generator=torch.Generator().manual_seed(0)).double()


def directions(*shape: int) -> Tensor:
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1)).double()


def network(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def along(function, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, first and second derivatives by nested forward mode."""
    tangents = direction.expand_as(x)

    def first(x: Tensor) -> Tensor:
        return jvp(function, (x,), (tangents,))[1]

    return function(x), *jvp(first, (x,), (tangents,))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_has_the_derivatives_of_its_function(name):
    """Oracle: nested `torch.func.jvp` of the same function of tensors."""
    x, ways = points(), directions(2)
    found = FUNCTIONS[name](jet(x, ways))
    for k, direction in enumerate(ways):
        value, first, second = along(FUNCTIONS[name], x, direction)
        close(found.streams[:, 0], value)
        close(found.streams[:, 1 + k], first)
        close(found.streams[:, 3 + k], second)
    assert found.shape == value.shape and found.ndim == found.dim() == value.ndim
    assert found.size() == value.shape and found.size(-1) == value.size(-1)
    assert (len(found), found.dtype, found.device) == (POINTS, value.dtype, value.device)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU("tanh"), nn.Softplus(2), nn.Sigmoid()])
def test_torch_layers_accept_jets(activation):
    """Oracle: gradient and Hessian of each output at each point."""
    model = network(nn.Sequential(nn.Linear(3, 6), activation, nn.Linear(6, 6), nn.Linear(6, 2)))
    x = points()
    found = model(jet(x))
    for feature in range(2):
        of_point = lambda x, feature=feature: model(x)[feature]  # noqa: E731
        close(found.value[:, feature], model(x)[:, feature])
        close(found.first[..., feature], vmap(grad(of_point))(x))
        close(found.second[..., feature], vmap(hessian(of_point))(x).diagonal(dim1=1, dim2=2))


def test_a_residual_has_the_gradients_of_its_weights():
    """Oracle: one row of J per point by `torch.func`, for a nonlinear residual."""
    model, x = network(Residual()), points()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def value(weights, x: Tensor) -> Tensor:
        return functional_call(model, weights, x[None])[0, 0]

    def of_point(weights, x: Tensor) -> Tensor:
        slope, curved = grad(value, 1)(weights, x), hessian(value, 1)(weights, x).diagonal()
        return slope[0] + value(weights, x) * slope[1] - 0.1 * curved.sum()

    u = model(jet(x))
    residuals = u.first[:, 0] + u.value * u.first[:, 1] - 0.1 * u.second.sum(1)
    close(residuals, vmap(of_point, (None, 0))(weights, x))
    rows = vmap(grad(of_point), (None, 0))(weights, x)
    found = torch.autograd.grad(residuals @ EACH, list(model.parameters()))
    for parameter, row in zip(found, rows.values()):
        close(parameter, torch.tensordot(EACH, row, 1))


def test_hooks_of_a_layer_see_all_streams():
    """Oracle: rows of J as sums of products over the streams, against `torch.func`."""
    model, x = network(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))), points()
    seen = {}
    model[2].register_forward_hook(lambda module, inputs, output: seen.update(x=inputs, y=output))
    residuals = model(jet(x)).second.sum(1)
    (g,) = torch.autograd.grad(residuals.sum(), seen["y"].streams)
    rows = torch.einsum("psi,pso->poi", seen["x"][0].streams, g)

    def of_point(weight: Tensor, x: Tensor) -> Tensor:
        call = lambda x: functional_call(model, {"2.weight": weight}, x)[0]  # noqa: E731
        return hessian(call)(x).trace()

    close(rows, vmap(grad(of_point), (None, 0))(model[2].weight.detach(), x))
    close(g[:, 0], torch.zeros_like(g[:, 0]))  # the bias is a part of the value alone


def test_directions_can_depend_on_the_point():
    """Oracle: nested `torch.func.jvp` with a tangent per point."""
    x, ways = points(), directions(POINTS, 1)
    model = network(Residual())
    found = model(jet(x, ways))
    value, first, second = along(model, x, ways[:, 0])
    assert found.value.shape == (POINTS,) and found.first.shape == (POINTS, 1)
    close(found.value, value[:, 0])
    close(found.first, first)
    close(found.second, second)


def test_mixed_derivatives_by_polarisation():
    """Oracle: an element of the Hessian."""
    x, model = points(), network(Residual())
    axes = torch.eye(INPUTS).double()
    second = model(jet(x, torch.stack([axes[0] + axes[2], axes[0] - axes[2]]))).second
    of_point = lambda x: model(x[None])[0, 0]  # noqa: E731
    close((second[:, 0] - second[:, 1]) / 4, vmap(hessian(of_point))(x)[:, 0, 2])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            torch.relu,
            r"no rule for torch's 'relu'; select .* p\[:, :1\], use .*tanh, .*as Jet.rules",
        ),
        (F.relu, "no rule for torch's 'relu'"),
        (lambda x: x.abs(), "no rule for torch's 'abs'"),
        (nn.LayerNorm(3), "no rule for torch's 'layer_norm'"),
        (nn.SiLU(inplace=True), "inplace=False"),
        (lambda x: x[2], "points before `jet`"),
        (lambda x: x[..., 0, 0], "points before `jet`"),
        (lambda x: x.sum(), r"dim=0 of a jet must be in \[1, 2\)"),
        (lambda x: torch.cat([x, x]), "operations must not mix points"),
        (lambda x: torch.stack([x, x], 3), "dim=3 of a jet"),
        (lambda x: x @ x, "only be multiplied by a matrix"),
        (lambda x: F.linear(x[:, 0], MATRIX.double()), "needs a jet"),
        (lambda x: x**x, "exponent of a jet must be a number"),
        (lambda x: x[:, torch.zeros(2, 2).long()], "one list or tensor, which must be one-dim"),
        (lambda x: x[..., torch.ones(7, 3) > 0], "one list or tensor, which must be one-dim"),
        (lambda x: x[:, None, [0, 1], [0, 1]], "too many items"),
        (lambda x: torch.stack([x, x], 2)[:, [0, 1], [0, 1]], "one list or tensor"),
        (lambda x: x[:, True], "one list or tensor"),
        (lambda x: x[:, 0][..., 0], "points before `jet`"),
        (lambda x: x.sum(None), "dim=0 of a jet"),
        (lambda x: x.sum(()), "dim=0 of a jet"),
        (lambda x: x.mean(axis=0), "dim=0 of a jet"),
        (lambda x: F.linear(input=x, weight=MATRIX), "'linear' does not take these arguments"),
        (lambda x: torch.mul(x, other=2), "'mul' does not take these arguments"),
        (lambda x: torch.tanh(input=x), "'tanh' does not take these arguments"),
        (lambda x: torch.pow(2, x), "'pow' does not take these arguments; pass the jet first"),
        (lambda x: 2**x, "'pow' does not take these arguments"),
        (nn.Dropout(), "dropout in training mode; call eval"),
        (nn.BatchNorm1d(3).eval(), "no rule for torch's 'batch_norm'"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(function, words):
    """Oracle: functions without a rule, and those that would mix points."""
    with pytest.raises(NotImplementedError, match=words):
        function(jet(points()))


@pytest.mark.parametrize(
    "change", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow]
)
def test_a_jet_is_not_changed_in_place(change):
    """Oracle: a second name of a tensor sees the change, and of a jet would not."""
    with pytest.raises(NotImplementedError, match="in place; write h = h"):
        change(jet(points()), 2.0)


def test_jets_and_tensors_of_other_shapes_are_refused():
    """Oracle: shapes that a tensor would broadcast over points."""
    x = jet(points())
    with pytest.raises(ValueError, match="equal numbers of directions and dim"):
        x + x[:, 0]
    with pytest.raises(ValueError, match="equal numbers"):
        x * jet(points(), directions(2))
    with pytest.raises(ValueError, match="not have more dimensions than Jet"):
        x[:, 0] * points()
    for wrong in (np.ones(3), [1.0, 2.0, 3.0], "1"):
        with pytest.raises(ValueError, match="must be combined with numbers, tensors and jets"):
            x + wrong
        with pytest.raises(ValueError, match="must be combined with"):
            wrong * x
    with pytest.raises(AttributeError, match="no attribute 'stream'"):
        x.stream  # noqa: B018


@pytest.mark.parametrize(
    ("x", "ways", "words"),
    [
        (torch.rand(4), None, r"\[4\] must be floating point \[points, inputs\]"),
        (torch.ones(4, 2).long(), None, "int64"),
        (torch.rand(4, 2), torch.eye(3), r"has shape \[3, 3\], but must have shape \[k, 2\]"),
        (torch.rand(4, 2), torch.ones(2), "directions"),
        (torch.rand(4, 2), torch.ones(3, 1, 2), r"or \[4, k, 2\], for k directions"),
        (torch.rand(4, 2), torch.ones(4, 2), r"one per point, .* use normals\[:, None\]"),
    ],
)
def test_points_and_directions_have_shapes(x, ways, words):
    """Oracle: shapes by hand."""
    with pytest.raises(ValueError, match=words):
        jet(x, ways)


def test_kfac_refuses_jets():
    """Oracle: the layer's name; a factor would count the bias in all streams."""
    model = network(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)))
    optimizer = mpikfac.KFACOptimizer(model)
    with pytest.raises(TypeError, match="layer '0' returned a Jet, which is not a tensor; .*skip"):
        model(jet(points()))
    model.eval()
    assert model(jet(points())).value.shape == (POINTS,)
    optimizer.trainer.close()


def test_a_rule_can_be_added(monkeypatch):
    """Oracle: nested `torch.func.jvp` of `torch.erf`."""

    def erf(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = 2 / math.sqrt(math.pi) * torch.exp(-v * v)
        return torch.erf(v), slope, -2 * v * slope

    monkeypatch.setitem(Jet.rules, "erf", erf)
    x, ways = points(), directions(1)
    found = torch.erf(jet(x, ways))
    for stream, expected in enumerate(along(torch.erf, x, ways[0])):
        close(found.streams[:, stream], expected)
