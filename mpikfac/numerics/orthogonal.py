"""Make the singular values of matrices equal, by products of matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpikfac.numerics.products import product

STEPS = 5
FIRST, THIRD, FIFTH = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5 [Muon]
LEAST = 128  # order of the smallest squares on a GPU, where few orders have few kernels


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

    F is `FIRST I + H` with `H = (THIRD I + FIFTH S) S`. Identities stay out of the products, which
    may round; a square S is `size` times what is kept, and H is `ratio FIRST` times.

    Args:
        squares: `X X^T` of matrices of any norm.
    """
    traces = squares.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]  # squares of norms
    traces.clamp_min_(torch.finfo(squares.dtype).tiny)
    squares, size, ratio = squares / traces, 1.0, THIRD / FIRST
    higher = torch.add(squares, product(squares, squares), alpha=FIFTH / THIRD)
    result = higher * (FIRST**STEPS * ratio)
    result.diagonal(dim1=-2, dim2=-1).add_(FIRST**STEPS)
    for _ in range(STEPS - 1):
        for _ in range(2):  # F commutes with the square
            squares = torch.add(squares, product(higher, squares), alpha=ratio)
        size, ratio = size * FIRST**2, ratio * FIRST**2
        higher = torch.add(squares, product(squares, squares), alpha=size * FIFTH / THIRD)
        result = torch.add(result, product(higher, result), alpha=ratio)
    return result / traces.sqrt()
