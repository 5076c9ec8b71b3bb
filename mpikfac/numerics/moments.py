"""Compute first and second moments of layer inputs and output gradients, and normalise moments.

B is the number of examples in the batch, S the number of positions that share a weight (outputs of
a convolution, tokens). `a` is a layer's inputs `[batch, shared, inputs]`, 1 appended for a bias,
and `g` the gradient of the *mean* loss at the layer's outputs `[batch, shared, outputs]`. Then

    expand         A = sum(a a^T) / (B S)      G = B sum(g g^T)

make `A (x) G` the layer's Fisher block if positions are independent, exactly for linear layers
[Grosse & Martens 2016; Eschenhagen et al. 2023]. Two more scalings exist for comparison; both
change the meaning of a damping value:

    sc20           A = sum(a a^T) / (B S^2)    G = B S sum(g g^T)       product as expand
    kfac-pytorch   A = sum(a a^T) / (B S^3)    G = sum(g g^T) / (B S^3) product B^2 S^5 smaller

For linear layers "sc20" and "kfac-pytorch" count positions as examples (S = 1).

Eva [Zhang et al. 2023] takes means in the place of second moments: A and G become `v v^T` with

    expand         v = sum(a) / (B S)          v = sum(g) / sqrt(S)

If all vectors are equal, `v v^T` equals the factors above. For linear layers (S = 1) the vectors
are the paper's means over examples: of inputs, and of gradients of an example's own loss. The
paper's published code takes `sum(g) / (B S)`, and a damping is then `B^2 S` times as large.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpikfac.numerics.products import product
from mpikfac.plan import Normalization


def factor_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """Return the factors that turn `sum(a a^T)` into A and `sum(g g^T)` into G."""
    if normalization == "expand":
        return 1 / (batch * shared), float(batch)
    if normalization == "sc20":
        return 1 / (batch * shared**2), batch * shared
    return 1 / (batch * shared**3), 1 / (batch * shared**3)


def vector_scales(normalization: Normalization, batch: int, shared: float) -> tuple[float, float]:
    """Return the factors of `sum(a)` and `sum(g)` that give A and G if all vectors are equal."""
    a, g = factor_scales(normalization, batch, shared)
    return math.sqrt(a / (batch * shared)), math.sqrt(g / (batch * shared))


def linear_input_sum(x: Tensor, bias: bool) -> Tensor:
    """Return `sum(a a^T)` `[inputs, inputs]` of a linear layer's input `[..., features]`."""
    rows = x.reshape(-1, x.shape[-1])
    total = product(rows.T, rows)
    return with_bias(total, linear_input_vector(x, bias)) if bias else total


def linear_output_sum(g: Tensor) -> Tensor:
    """Return `sum(g g^T)` `[outputs, outputs]` of gradients `[..., outputs]`."""
    rows = g.reshape(-1, g.shape[-1])
    return product(rows.T, rows)


def linear_input_vector(x: Tensor, bias: bool) -> Tensor:
    """Return `sum(a)` `[inputs]` of a linear layer's input `[..., features]`."""
    rows = x.reshape(-1, x.shape[-1])
    return with_count(rows.sum(0), len(rows)) if bias else rows.sum(0)


def linear_output_vector(g: Tensor) -> Tensor:
    """Return `sum(g)` `[outputs]` of gradients `[..., outputs]`."""
    return g.reshape(-1, g.shape[-1]).sum(0)


def squares(rows: Tensor, diagonal: bool = False) -> Tensor:
    """Return `sum(v v^T)` over `rows` `[batch, n]`, or by group over `rows` `[batch, groups, n]`.

    The shape is `[n, n]` or `[groups, n, n]`; for a diagonal, all elements as `[count, 1, 1]`.
    """
    if diagonal:
        return rows.square().sum(0).view(-1, 1, 1)
    if rows.dim() == 2:
        return product(rows.T, rows)
    return rows.permute(1, 2, 0) @ rows.transpose(0, 1)


def with_bias(total: Tensor, vector: Tensor) -> Tensor:
    """Return `sum(a a^T)` after appending a 1 to every vector `a`.

    Args:
        total: `sum(a a^T)` without the 1, `[..., n, n]`.
        vector: `sum(a)` with the 1, `[..., n + 1]`.
    """
    n = total.shape[-1]
    grown = total.new_empty(*total.shape[:-2], n + 1, n + 1)
    grown[..., :n, :n] = total
    grown[..., n, :] = grown[..., :, n] = vector
    return grown


def with_count(vector: Tensor, count: int) -> Tensor:
    """Return `sum(a)` `[..., n + 1]` after appending a 1 to all of the `count` vectors `a`."""
    return torch.cat([vector, vector.new_full((*vector.shape[:-1], 1), count)], -1)
