"""Make the singular values of matrices equal, by products of matrices alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 5
FIRST, THIRD, FIFTH = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5 [Muon]


def orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices with the same singular vectors, and with singular values near 1.

    Five steps of an odd polynomial bring all singular values above 0.002 of a matrix's norm to
    between 0.68 and 1.21; a smaller singular value grows by a factor of 485 at most. Zeros stay
    zeros, and a matrix that is not finite becomes NaN.

    Args:
        matrices: `[..., outputs, inputs]` each; a leading dimension counts matrices.
    """
    found: dict[int, Tensor] = {}
    by_shape = defaultdict(list)
    for place, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(place)
    for places in by_shape.values():  # a stack has the kernels of a single matrix
        stack = torch.stack([matrices[place] for place in places])
        found.update(zip(places, _stack_orthogonalised(stack)))
    return [found[place] for place in range(len(matrices))]


def _stack_orthogonalised(stack: Tensor) -> Tensor:
    """Return the matrices of a stack, orthogonalised.

    With X the wide form of a matrix, a step is `X <- F X`, where F is a polynomial of `X X^T`. The
    steps go on with the small matrix `X X^T`, and the product of all F meets the wide X once.
    """
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    square = x @ x.mT
    product = torch.eye(square.shape[-1], dtype=x.dtype, device=x.device)
    for _ in range(STEPS):
        factor = THIRD * square + FIFTH * square @ square
        factor.diagonal(dim1=-2, dim2=-1).add_(FIRST)
        product = factor @ product
        square = factor @ square @ factor
    x = product @ x
    return x.mT if tall else x
