"""Multiply matrices, and a layer's gradient by matrices or diagonals from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 2**24  # multiplications of a product of two matrices that oneDNN pays off for


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `a @ b`, computed by the faster of two libraries.

    `@` calls MKL. On processors not made by Intel, oneDNN multiplies float32 matrices twice as fast
    as MKL, one matrix at a time. oneDNN takes the second matrix transposed, so a copy of the matrix
    has to pay off, too.
    """
    large = a.is_cpu and a.dtype == torch.float32 and math.prod(a.shape[-2:]) * b.shape[-1] >= LARGE
    if large and a.dim() == b.dim() == 3:
        found = torch.stack(list(map(product, a, b)))
    elif large and a.dim() == 2 and (b.T.is_contiguous() or len(a) >= 256):
        found = F.linear(a.to_mkldnn(), b.T.contiguous().to_mkldnn()).to_dense()
    else:
        return torch.matmul(a, b, out=out)
    return found if out is None else out.copy_(found)


# -- a layer's gradient between its factors -------------------------------------------------------

Side = Sequence[Tensor]
"""The matrix S in the place of A or G: blocks along the diagonal, `[n, n]`, or a diagonal `[n]`; no
blocks mean the identity. With groups, `[groups, n, n]`; the gradient is then
`[groups, outputs, inputs]`.

A block of low rank, U `[n, rank]`, means `[I U]` `[n, n + rank]`: a product with the transpose
keeps the multiplied matrix and appends the matrix's coordinates in U."""


def from_left(side: Side, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return `S @ matrix` or `S^T @ matrix`, with the side's matrix S."""
    if len(side) == 1:
        return _block_from_left(side[0], matrix, transpose)
    multiply = partial(_block_from_left, transpose=transpose)
    return _block_by_block(multiply, side, matrix, -2, _rows if transpose else _columns)


def from_right(matrix: Tensor, side: Side, transpose: bool = False) -> Tensor:
    """Return `matrix @ S` or `matrix @ S^T`, with the side's matrix S."""
    if len(side) == 1:
        return _block_from_right(side[0], matrix, transpose)
    multiply = partial(_block_from_right, transpose=transpose)
    return _block_by_block(multiply, side, matrix, -1, _columns if transpose else _rows)


def _block_by_block(
    multiply: Callable[[Tensor, Tensor], Tensor],
    side: Side,
    matrix: Tensor,
    dim: int,
    length: Callable[[Tensor], int],
) -> Tensor:
    """Cut the matrix along `dim` by the blocks' `length`, and multiply every part by its block."""
    if not side:
        return matrix
    if len(side) == 1:
        return multiply(side[0], matrix)
    parts = matrix.split([length(block) for block in side], dim)
    return torch.cat([multiply(b, part) for b, part in zip(side, parts)], dim)


def _rows(block: Tensor) -> int:
    return block.shape[-2]


def _columns(block: Tensor) -> int:
    order, vectors = block.shape[-2:]
    return order if vectors == order else order + vectors


def _values(block: Tensor) -> int:
    order, vectors = block.shape[-2:]
    return order if vectors == order else 1 + vectors


def _block_from_left(block: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
    if block.dim() < matrix.dim():
        return block[..., :, None] * matrix
    order, vectors = block.shape[-2:]
    if vectors == order:
        return product(block.mT if transpose else block, matrix)
    if transpose:
        return torch.cat([matrix, product(block.mT, matrix)], -2)
    return matrix[..., :order, :] + product(block, matrix[..., order:, :])


def _block_from_right(block: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
    if block.dim() < matrix.dim():
        return matrix * block[..., None, :]
    order, vectors = block.shape[-2:]
    if vectors == order:
        return product(matrix, block.mT if transpose else block)
    if not transpose:
        return torch.cat([matrix, product(matrix, block)], -1)
    return matrix[..., :order] + product(matrix[..., order:], block.mT)


def of_coordinates(weights: Tensor, vectors: Side) -> Tensor:
    """Return the factors of coordinates `[I U]` that multiply vectors by `weights` (last dim).

    `w_rest (I - U U^T) + U diag(w) U^T` is `w_rest I + U diag(w - w_rest) U^T`. The second form
    needs no product with a projection, and no denominators for directions outside of U.
    """
    return _block_by_block(_of_block, vectors, weights, -1, _values)


def _of_block(block: Tensor, weights: Tensor) -> Tensor:
    if block.dim() < weights.dim() or _rows(block) == block.shape[-1]:
        return weights
    outside, inside = weights[..., :1], weights[..., 1:]
    return torch.cat([outside.expand(*outside.shape[:-1], _rows(block)), inside - outside], -1)
