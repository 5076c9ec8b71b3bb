"""Make the singular values of matrices equal, by products of matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpikfac.numerics.products import product

STEPS = 5
FIRST, THIRD, FIFTH = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5 [Muon]
LEAST = 64  # order of the smallest squares on a GPU, where few orders have few kernels


def orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices with the same singular vectors, and with singular values near 1.

    Five steps of an odd polynomial bring all singular values above 0.002 of a matrix's norm to
    between 0.68 and 1.21; a smaller singular value grows by a factor of 485 at most. Zeros stay
    zeros, and a matrix that is not finite becomes NaN.

    With X a matrix of norm 1 in its wide form, a step is `X <- F X`, where F is a polynomial of
    `X X^T`. The product of all F meets the wide matrix once, at the end.

    Args:
        matrices: `[..., outputs, inputs]` each; leading dimensions count matrices.
    """
    stacks, places = list[Tensor](), dict[int, list[int]]()
    for place, matrix in enumerate(matrices):
        stack, order = matrix.reshape(-1, *matrix.shape[-2:]), min(matrix.shape[-2:])
        stacks.append(stack.mT if stack.shape[1] > stack.shape[2] else stack)  # the wide form
        few = order if matrix.is_cpu else max(LEAST, 1 << (order - 1).bit_length())
        places.setdefault(few, []).append(place)
    for order, chosen in places.items():
        counts = [len(stacks[place]) for place in chosen]
        squares = stacks[chosen[0]].new_zeros(sum(counts), order, order)
        for place, room in zip(chosen, squares.split(counts)):
            stack, n = stacks[place], stacks[place].shape[1]
            product(stack, stack.mT, out=room[:, :n, :n])  # beside zeros, which stay zeros
        for place, polynomial in zip(chosen, _polynomials(squares).split(counts)):
            stack, n = stacks[place], stacks[place].shape[1]
            stacks[place] = product(polynomial[:, :n, :n], stack)
    pairs = zip(matrices, stacks)
    return [(y if x.shape[-1] == y.shape[-1] else y.mT).reshape(x.shape) for x, y in pairs]


def _polynomials(squares: Tensor) -> Tensor:
    """Return what orthogonalises matrices: the product of all F, over the norm, `[k, n, n]`.

    Args:
        squares: `X X^T` of matrices of any norm.
    """
    traces = squares.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # squares of norms
    traces.clamp_min_(torch.finfo(squares.dtype).tiny)
    squares = squares / traces
    third = THIRD * torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    result = polynomial = _polynomial(squares, third)
    for _ in range(STEPS - 1):  # F commutes with the square
        squares = product(product(polynomial, squares), polynomial)
        polynomial = _polynomial(squares, third)
        result = product(polynomial, result)
    return result / traces.sqrt()


def _polynomial(squares: Tensor, third: Tensor) -> Tensor:
    """Return `F = FIRST I + (THIRD I + FIFTH S) S`, from squares S."""
    polynomial = product(torch.add(third, squares, alpha=FIFTH), squares)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(FIRST)
    return polynomial
