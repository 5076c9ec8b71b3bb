"""Make the singular values of matrices equal, by products of matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpikfac.numerics.products import product

STEPS = 5
FIRST, THIRD, FIFTH = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5 [Muon]
LEAST = 64  # order up to which a GPU takes all squares for one stack


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
    stacks = [_as_stack(matrix.mT if _is_tall(matrix) else matrix) for matrix in matrices]
    places: dict[int, list[int]] = {}
    for place, stack in enumerate(stacks):
        places.setdefault(_order_of_squares(stack), []).append(place)
    results = list(stacks)
    for order, chosen in places.items():
        squares = _squares([stacks[place] for place in chosen], order)
        polynomials = _polynomials(squares).split([len(stacks[place]) for place in chosen])
        for place, polynomial in zip(chosen, polynomials):
            results[place] = product(_corner(polynomial, stacks[place]), stacks[place])
    pairs = zip(matrices, results)
    return [(found.mT if _is_tall(x) else found).reshape(x.shape) for x, found in pairs]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _as_stack(matrix: Tensor) -> Tensor:
    """Return `matrix` `[..., rows, columns]` as a stack `[matrices, rows, columns]`."""
    return matrix.flatten(0, -3) if matrix.dim() > 2 else matrix[None]


def _order_of_squares(wide: Tensor) -> int:
    """Return the order in which a stack's squares are kept: few orders have few kernels.

    On a GPU, small squares lie in the corner of zeros: zeros stay zeros.
    """
    order = wide.shape[-2]
    return order if wide.is_cpu else max(LEAST, 1 << (order - 1).bit_length())


def _squares(stacks: Sequence[Tensor], order: int) -> Tensor:
    """Return `X X^T` of all matrices of the stacks, `[matrices, order, order]`."""
    counts = [len(stack) for stack in stacks]
    squares = stacks[0].new_zeros(sum(counts), order, order)
    for stack, room in zip(stacks, squares.split(counts)):
        product(stack, stack.mT, out=_corner(room, stack))
    return squares


def _corner(squares: Tensor, stack: Tensor) -> Tensor:
    """Return the part of squares that belongs to the matrices of a stack."""
    return squares[:, : stack.shape[-2], : stack.shape[-2]]


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
