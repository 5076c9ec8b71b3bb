"""Factors with few kept leading eigenvectors, against dense solves in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpikfac.numerics import eigenbases
from mpikfac.plan import LayerShape
from support import oracles


def symmetric(*shape):
    """Return positive semidefinite matrices with decaying spectra."""
    rows = torch.randn(*shape[:-1], 3, shape[-1]).double() * torch.logspace(0, -1, 3)[:, None]
    product = rows.mT @ rows + 0.1 * torch.eye(shape[-1]).double()
    return (product + product.mT) / 2


def kept(matrix: Tensor, rank: int | None) -> Tensor:
    """Return the low-rank approximation of a matrix, written out."""
    order = len(matrix)
    if rank is None or rank >= order:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    leading = vectors[:, order - rank :]
    rest = values[: order - rank].mean()
    projection = leading @ leading.T
    outside = rest * (torch.eye(order).double() - projection)
    return leading * values[order - rank :] @ leading.T + outside


def decomposed(layer, side, factors):
    """Return values and vectors of all factors of a side, in the plan's forms."""
    found = []
    for shape, factor in zip(layer.side(side), factors):
        if side in layer.diagonal:
            own = factor.diagonal(dim1=-2, dim2=-1)
            found.append((own, torch.ones_like(own)))
            continue
        basis = eigenbases.eigenbasis(factor)
        if shape.rank is not None:
            basis = eigenbases.leading_eigenbasis(factor, shape.rank)
        assert [tuple(part.shape) for part in basis] == [shape.part(1), shape.part(2)]
        found.append(basis)
    return [values for values, _ in found], [vectors for _, vectors in found]


@st.composite
def layers(draw):
    """Draw layers of some rank: whole, in blocks, of a single side, with a diagonal, in groups."""
    layer = LayerShape("layer", draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    groups, diagonal = draw(st.sampled_from([(1, ""), (1, "A"), (1, "G"), (3, "")]))
    return replace(
        layer,
        groups=groups,
        sides=draw(st.sampled_from(["AG", "AG", "A", "G"])) if not diagonal else "AG",
        diagonal=diagonal,
        largest=draw(st.sampled_from([None, 5])),
        rank=draw(st.integers(1, 6)),
    )


def factors_of(layer):
    """Return random factors of both sides, of all groups."""
    groups = () if layer.groups == 1 else (layer.groups,)
    orders = {"A": layer.inputs, "G": layer.outputs}
    return {
        side: [symmetric(*groups, orders[side])]
        if side in layer.diagonal
        else [symmetric(*groups, shape.order) for shape in layer.side(side)]
        for side in "AG"
    }


def dense(layer, side, factors, group):
    """Return the matrix for a side of a single group, written out."""
    order = layer.inputs if side == "A" else layer.outputs
    if side not in layer.sides:
        return torch.eye(order).double()
    own = [factor[group] if layer.groups > 1 else factor for factor in factors]
    if side in layer.diagonal:
        return own[0].diagonal().diag()
    return torch.block_diag(*(kept(matrix, layer.rank) for matrix in own))


@given(layers(), st.floats(1e-3, 10), st.integers(0, 9))
@settings(max_examples=150)
def test_preconditioning_is_the_exact_inverse_of_what_is_kept(layer, damping, seed):
    """Oracle: the dense solve with the approximated factors, group by group."""
    torch.manual_seed(seed)
    factors = factors_of(layer)
    gradient = torch.randn(layer.gradient).double()
    (a_values, a), (g_values, g) = (decomposed(layer, s, factors[s]) for s in "AG")
    denominators = torch.empty(layer.denominators).double()
    eigenbases.damped_denominators(a_values, g_values, damping, denominators)
    out = eigenbases.precondition(gradient, a, g, denominators).view(
        layer.groups, *gradient.shape[-2:]
    )
    for group, one in enumerate(gradient.view_as(out)):
        inputs, outputs = (dense(layer, side, factors[side], group) for side in "AG")
        expected = oracles.kronecker_solve(one, inputs, outputs, damping)
        torch.testing.assert_close(out[group], expected, rtol=1e-10, atol=1e-10)


@given(layers(), st.integers(0, 9))
@settings(max_examples=100)
def test_means_of_low_rank_are_those_of_the_factor(layer, seed):
    """Oracle: the mean diagonal of every factor's approximation; the trace is kept."""
    torch.manual_seed(seed)
    factors = factors_of(layer)
    for side in layer.sides:
        values, vectors = decomposed(layer, side, factors[side])
        for own, mean, factor in zip(
            values, eigenbases.mean_eigenvalues(values, vectors), factors[side]
        ):
            expected = factor.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).expand_as(own)
            torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)


@given(st.integers(2, 12), st.integers(1, 6), st.floats(0, 2), st.integers(0, 9))
def test_low_rank_and_a_multiple_of_the_identity_lose_nothing(order, rank, rest, seed):
    """Oracle: the factor."""
    torch.manual_seed(seed)
    rank = min(rank, order - 1)
    rows = torch.randn(rank, order).double()
    factor = rows.T @ rows + rest * torch.eye(order).double()
    (first, *others), vectors = eigenbases.leading_eigenbasis(factor, rank)
    turned = vectors * torch.stack(others)
    found = turned @ vectors.T + first * (torch.eye(order).double() - vectors @ vectors.T)
    torch.testing.assert_close(found, factor, rtol=1e-12, atol=1e-12)


@given(layers())
def test_shapes_of_low_rank(layer):
    """Oracle: a side's values add up to the denominators; n * rank numbers in the place of n^2."""
    *_, outputs, inputs = layer.denominators
    for side, values, order in (("A", inputs, layer.inputs), ("G", outputs, layer.outputs)):
        if side not in layer.sides or side in layer.diagonal:
            assert values == order
            continue
        shapes = layer.side(side)
        assert values == sum(min(layer.rank + 1, shape.order) for shape in shapes)
        for shape in shapes:
            vectors = min(layer.rank, shape.order)
            assert math.prod(shape.part(2)) == layer.groups * shape.order * vectors
            assert shape.rank in (layer.rank, None)
            assert shape.work() <= replace(shape, rank=None).work()
