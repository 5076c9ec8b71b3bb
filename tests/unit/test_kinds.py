"""Every kind of layer, compared with the module's derivatives by autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mpikfac import layers
from mpikfac.numerics import copy_all
from mpikfac_apps.checking import reference
from support.brute import matrices, own_gradients, rows, squares, vectors

BATCH = 3
KINDS = {**layers.KINDS, **layers.NORMS}


class Conv1D(nn.Module):
    """The computation of a class of transformers, under the class's name."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


LINEAR = [  # layers that multiply inputs by a weight, and an example's input
    (lambda: nn.Linear(3, 4), (3,)),
    (lambda: nn.Linear(3, 4, bias=False), (2, 3)),
    (lambda: Conv1D(4, 3), (2, 3)),
    (lambda: frozen(Conv1D(4, 3), "weight"), (2, 3)),
    (lambda: frozen(Conv1D(4, 3), "bias"), (3,)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 7)),
    (lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2), (4, 5, 6)),
    (lambda: nn.Conv2d(3, 6, 3, groups=3, padding="same", bias=False), (3, 4, 5)),
    (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), groups=2), (2, 3, 4, 3)),
    (lambda: nn.Conv3d(2, 2, (2, 1, 3), padding="same", padding_mode="circular"), (2, 3, 2, 4)),
    (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4)),
    (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), dilation=(1, 2), groups=2), (4, 3, 3)),
    (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, bias=False), (2, 2, 2, 2)),
    (lambda: nn.ConvTranspose2d(2, 3, (1, 2), padding=(1, 0)), (2, 4, 3)),
    (lambda: frozen(nn.Linear(3, 4), "weight"), (2, 3)),
    (lambda: frozen(nn.Conv2d(4, 6, 3, groups=2), "weight"), (4, 4, 4)),
    (lambda: frozen(nn.Conv2d(4, 6, 3, groups=2), "bias"), (4, 4, 4)),
]
EMBEDDINGS = [
    (lambda: nn.Embedding(5, 3), ()),
    (lambda: nn.Embedding(5, 3), (4,)),
    (lambda: nn.Embedding(5, 3, padding_idx=1), (4,)),
]
NORMS = [
    (lambda: nn.LayerNorm(4), (3, 4)),
    (lambda: nn.LayerNorm((2, 3), bias=False), (4, 2, 3)),
    (lambda: nn.RMSNorm(5), (5,)),
    (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    (lambda: nn.BatchNorm1d(3), (3,)),
    (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    (lambda: frozen(nn.BatchNorm3d(2), "weight"), (2, 2, 1, 3)),
    (lambda: frozen(nn.GroupNorm(1, 4), "bias"), (4, 2)),
]


def frozen(module, name):
    """Return the module with a single frozen parameter."""
    getattr(module, name).requires_grad_(False)
    return module


def case(make, shape):
    """Return a layer in float64, an input, and a gradient of the layer's output."""
    torch.manual_seed(0)
    module = make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model = nn.Sequential(module)
    (layer,), _ = layers.cover(model, layers.Coverage(covers=KINDS))
    x = torch.randn(BATCH, *shape).double()
    if isinstance(module, nn.Embedding):
        x = torch.randint(len(module.weight), (BATCH, *shape))
    return layer, x, torch.randn_like(module(x))


def moments(layer, side, x, g):
    x = layer.prepared(x, g)
    return layer.second_moment(side, x, g), layer.first_moment(side, x, g)


def check(layer, side, x, g, expected):
    """Compare second and first moments, whole and diagonal, with vectors `[..., groups, n]`."""
    layer.shape = replace(layer.shape, diagonal="")
    whole = squares(expected)
    first = expected.flatten(0, -3).sum(0)
    second, total = moments(layer, side, x, g)
    torch.testing.assert_close(second, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(total.view_as(first), first, rtol=1e-10, atol=1e-10)
    layer.shape = replace(layer.shape, diagonal=side)
    second, _ = moments(layer, side, x, g)
    diagonal = whole.diagonal(dim1=-2, dim2=-1).reshape(-1, 1, 1)
    torch.testing.assert_close(second, diagonal, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("make", "shape"), [*LINEAR, *EMBEDDINGS])
def test_moments_of_positions(make, shape):
    """Oracle: autograd's derivatives of the module's outputs; gradients one by one."""
    layer, x, g = case(make, shape)
    if "A" in layer.shape.sides:
        a = vectors(layer, x)
        assert layer.positions(g) == a.shape[0] * a.shape[1]
        check(layer, "A", x, g, a)
    layer, x, g = case(make, shape)
    check(layer, "G", x, g, rows(layer, g))


@pytest.mark.parametrize(("make", "shape"), [*LINEAR, *EMBEDDINGS])
def test_moments_of_examples(make, shape):
    """Oracle: the same, inputs averaged and gradients added up over an example's positions."""
    layer, x, g = case(make, shape)
    layer.shape = replace(layer.shape, kfac_approx="reduce", diagonal="")
    assert layer.positions(g) == BATCH
    if "A" in layer.shape.sides:
        means = vectors(layer, x).mean(1)
        second, first = moments(layer, "A", x, g)
        torch.testing.assert_close(second, squares(means))
        torch.testing.assert_close(first.view_as(means[0]), means.sum(0))
    totals = rows(layer, g).sum(1)
    second, first = moments(layer, "G", x, g)
    torch.testing.assert_close(second, squares(totals))
    torch.testing.assert_close(first.view_as(totals[0]), totals.sum(0))


@pytest.mark.parametrize(("make", "shape"), [*LINEAR, *EMBEDDINGS])
def test_gradients_are_sums_of_outer_products(make, shape):
    """Oracle: `sum(g a^T)` over all positions, of autograd's derivatives of outputs."""
    layer, x, g = case(make, shape)
    gradients = torch.autograd.grad(layer.module(x), layer.parameters, g)
    found = matrices(layer, gradients)
    if layer.shape.sides == "G":
        expected = rows(layer, g).sum((0, 1))[..., None]
    else:
        expected = torch.einsum("bsgo,bsgi->goi", rows(layer, g), vectors(layer, x))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("make", "shape"), [*LINEAR, *EMBEDDINGS])
def test_modules_show_their_vectors(make, shape):
    """Compare the vectors of `mpikfac check`. Oracle: autograd's derivatives of outputs."""
    layer, x, g = case(make, shape)
    call = reference.Call(x, g)
    torch.testing.assert_close(
        reference.gradients(layer, call), reference.gradients_alone(layer, call)
    )
    torch.testing.assert_close(reference.output_vectors(layer, g), rows(layer, g))
    if "A" in layer.shape.sides:
        torch.testing.assert_close(reference.input_vectors(layer, x), vectors(layer, x))


@pytest.mark.parametrize(("make", "shape"), NORMS)
def test_blocks_of_normalisations(make, shape):
    """Oracle: autograd's gradients of scale and shift if every example has own copies."""
    layer, x, g = case(make, shape)
    plain, u = own_gradients(layer.module, x, g)
    prepared = layer.prepared(x, g)
    torch.testing.assert_close(plain, prepared)
    expected = torch.einsum("bui,buj->uij", u, u)
    torch.testing.assert_close(layer.second_moment("A", prepared, g), expected)
    torch.testing.assert_close(layer.first_moment("A", prepared, g), u.sum(0))
    assert layer.scales("expand", BATCH, BATCH, False) == {"A": BATCH}
    matrix = torch.randn(layer.shape.gradient).double()
    copy_all(layer.gradients_from(layer.parts(matrix)))
    read = torch.stack([parameter.grad.flatten() for parameter in layer.parameters], -1)
    assert torch.equal(read, matrix[:, 0])


@pytest.mark.parametrize(("make", "shape"), [*LINEAR, *EMBEDDINGS, *NORMS])
def test_values_go_to_a_matrix_and_back(make, shape):
    """Oracle: the values before; twice the matrix is twice the values."""
    layer, _, _ = case(make, shape)
    before = [parameter.detach().clone() for parameter in layer.parameters]
    matrix = torch.empty(layer.shape.gradient, dtype=torch.float64)
    copy_all(layer.values_to(layer.parts(matrix)))
    assert matrix.square().sum().isclose(sum(value.square().sum() for value in before))
    copy_all(layer.values_from(layer.parts(2 * matrix)))
    assert all(torch.equal(p, 2 * value) for p, value in zip(layer.parameters, before))


def test_an_input_without_a_batch_is_one_example():
    """Oracle: the least number of dimensions of every kind's inputs with a batch."""
    least = {"Linear": 2, "Conv1d": 3, "Conv3d": 5, "Embedding": 1, "GroupNorm": 2}
    for make, shape in [*LINEAR, *EMBEDDINGS, *NORMS]:
        layer, _, _ = case(make, shape)
        kind = type(layer.module).__name__
        assert layer.dimensions == least.get(kind, layer.dimensions)
    layer, _, _ = case(lambda: nn.LayerNorm((2, 3)), (2, 3))
    assert layer.dimensions == 3


def test_a_transposed_convolution_may_be_asked_for_a_size():
    """Oracle: the module whose `output_padding` gives the same size."""
    make = nn.ConvTranspose1d(2, 3, 3, stride=3, padding=1, output_padding=2)
    padded, x, g = case(lambda: make, (2, 4))
    asked, _, _ = case(lambda: nn.ConvTranspose1d(2, 3, 3, stride=3, padding=1), (2, 4))
    assert asked.module(x, output_size=g.shape[2:]).shape == g.shape
    torch.testing.assert_close(moments(asked, "A", x, g), moments(padded, "A", x, g))
