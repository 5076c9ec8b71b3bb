"""Make the singular values of matrices equal, using only matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpikfac.numerics.products import product

STEPS = (
    (8.3898, -24.7901, 18.3763),
    (4.0530, -3.0181, 0.5703),
    (3.5334, -2.6470, 0.5280),
    (2.5235, -1.8626, 0.4399),
)
"""Coefficients of x, x^3 and x^5: each polynomial minimises the maximum distance from 1 on the
range to which the previous ones map [1/350, 1] [Polar Express]."""
MARGIN = 2.0  # multiplies the bound: at 1, terms of the first polynomial cancel and errors grow
LEAST = 128  # the minimum order of squares on a GPU: fewer different orders need fewer kernels


def orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices with unchanged singular vectors, and with singular values near 1.

    Four odd polynomials move all singular values above 1/350 of a bound on the largest one into
    the interval [0.78, 1.24]. A smaller singular value s becomes at least 270 s / bound. Zeros stay
    zeros, and a matrix that is not finite becomes NaN.

    Let X be a matrix in its wide form (transposed if it has more rows than columns), divided by a
    bound on its largest singular value. A step is `X <- F X`, where F is a polynomial of `X X^T`.
    The product of all F is multiplied by the wide matrix once, at the end.

    Args:
        matrices: `[..., outputs, inputs]` each; leading dimensions are batch dimensions.
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
            product(stack, stack.mT, out=room[:, :n, :n])  # the padding stays zero
        for place, polynomial in zip(chosen, _polynomials(squares).split(counts)):
            stack, n = stacks[place], stacks[place].shape[1]
            stacks[place] = product(polynomial[:, :n, :n], stack)
    pairs = zip(matrices, stacks)
    return [(y if x.shape[-1] == y.shape[-1] else y.mT).reshape(x.shape) for x, y in pairs]


def _polynomials(squares: Tensor) -> Tensor:
    """Return the product of all steps' F, divided by the bound on the singular values, `[k, n, n]`.

    The product of the result and the matrix is approximately orthogonal.

    A step's polynomial F is `first I + H` with `H = (third I + fifth S) S`, where S is `X X^T` in
    this step, and the coefficients are from `STEPS`. The product of all F is `scale I + R`.
    Identities are thus kept out of the products, in which they could be rounded.

    Args:
        squares: `X X^T` of matrices with any norm.
    """
    limits = torch.finfo(squares.dtype)
    traces = squares.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp_min_(limits.tiny)
    squares = squares / traces
    higher = product(squares, squares)
    # The root of the norm of S^2 is at least the largest eigenvalue of S, and close to it [CANS].
    bound = higher.norm(dim=(-2, -1), keepdim=True).sqrt_().mul_(MARGIN).clamp_min_(limits.eps)
    squares, higher = squares / bound, higher / bound**2
    scale, rest = 1.0, higher  # the first iteration turns both, which are the same tensor, into H
    for number, (first, third, fifth) in enumerate(STEPS):
        higher = higher.mul_(fifth).add_(squares, alpha=third)  # H
        if number:
            rest = product(higher, rest).add_(rest, alpha=first).add_(higher, alpha=scale)
        scale *= first
        if number < len(STEPS) - 1:
            for _ in range(2):  # F commutes with the square
                squares = product(higher, squares).add_(squares, alpha=first)
            higher = product(squares, squares)
    rest.diagonal(dim1=-2, dim2=-1).add_(scale)
    return rest.div_(traces.sqrt()).div_(bound.sqrt())  # their product can underflow
