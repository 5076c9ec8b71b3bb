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

    With X the wide form of a matrix, a step is `X <- F X`, where F is a polynomial of `X X^T`. The
    product of all F meets the wide X once, at the end.

    Args:
        matrices: `[..., outputs, inputs]` each; a leading dimension counts matrices.
    """
    places = defaultdict(list)  # by shape: a stack has the kernels of a single matrix
    for place, matrix in enumerate(matrices):
        places[matrix.shape].append(place)
    by_order = defaultdict(list)
    for shape, chosen in places.items():
        unit = _unit(torch.stack([matrices[place] for place in chosen]))
        by_order[unit.shape[-2]].append((shape, unit))
    results: dict[int, Tensor] = {}
    for stacks in by_order.values():
        squares = [unit @ unit.mT for _, unit in stacks]
        products = _products(torch.cat(squares)).split(list(map(len, squares)))
        for (shape, unit), product in zip(stacks, products):
            wide = product @ unit
            back = wide.mT if shape[-2] > shape[-1] else wide
            results |= zip(places[shape], back.reshape(-1, *shape))
    return [results[place] for place in range(len(matrices))]


def _unit(stack: Tensor) -> Tensor:
    """Return matrices of norm 1 in their wide form, `[matrices, smaller, larger order]`."""
    wide = (stack.mT if stack.shape[-2] > stack.shape[-1] else stack).flatten(0, -3)
    norms = wide.norm(dim=(-2, -1), keepdim=True)
    return wide / norms.clamp_min(torch.finfo(wide.dtype).tiny)


def _products(squares: Tensor) -> Tensor:
    """Return the products of the polynomials F of all steps, from squares `X X^T`, `[k, n, n]`."""
    higher = _higher(squares)
    identity = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    product = torch.add(higher, identity, alpha=FIRST)
    for _ in range(STEPS - 1):
        for _ in range(2):  # F commutes with the square
            squares = torch.baddbmm(squares, higher, squares, beta=FIRST)
        higher = _higher(squares)
        product = torch.baddbmm(product, higher, product, beta=FIRST)
    return product


def _higher(squares: Tensor) -> Tensor:
    """Return `F - FIRST I`, from squares `X X^T`."""
    return torch.baddbmm(squares, squares, squares, beta=THIRD, alpha=FIFTH)
