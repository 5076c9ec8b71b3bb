"""Store symmetric matrices as folded triangles, which halves the memory and the bytes to send.

The lower triangle is folded into a full rectangle (shape: `plan.layout.triangle_shape`), as in
LAPACK's rectangular full packed format. The lower left block is stored unchanged. The triangles of
the two diagonal blocks follow below, interlocked because the second one is transposed. Folding uses
only slices, not index tensors. All functions also accept a stack of matrices of the same order,
`[count, n, n]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_largest: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def add_triangle(packed: Tensor, matrix: Tensor, weight: float = 1.0) -> None:
    """Add the lower triangle of a symmetric `matrix` `[n, n]`, times `weight`, to `packed`."""
    lower_left, first, second = _fold(packed)
    half = first.shape[-1]
    lower, size = _lower(half, packed.dtype, packed.device), second.shape[-1]
    lower_left.add_(matrix[..., half:, :half], alpha=weight)
    first.addcmul_(matrix[..., :half, :half], lower, value=weight)
    second.addcmul_(matrix[..., half:, half:], lower[:size, :size].mT, value=weight)


def add_identity(packed: Tensor, weight: float | Tensor = 1.0) -> None:
    """Add the identity, times `weight`, to the matrix that `packed` holds."""
    _, first, second = _fold(packed)
    first.diagonal(dim1=-2, dim2=-1).add_(weight)
    second.diagonal(dim1=-2, dim2=-1).add_(weight)


def unfold_triangle(packed: Tensor) -> Tensor:
    """Return the symmetric matrix `[n, n]` that `packed` holds."""
    lower_left, first, second = _fold(packed)
    half = first.shape[-1]
    order = half + lower_left.shape[-2]
    matrix = packed.new_empty(*packed.shape[:-2], order, order)
    matrix[..., half:, :half] = lower_left
    matrix[..., :half, half:] = lower_left.mT
    lower, size = _lower(half, torch.bool, packed.device), order - half
    torch.where(lower, first, first.mT, out=matrix[..., :half, :half])
    torch.where(lower[:size, :size], second.mT, second, out=matrix[..., half:, half:])
    return matrix


def _lower(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a lower triangular matrix `[n, n]` of ones; the largest one is cached."""
    ones = _largest.get((dtype, device))
    if ones is None or len(ones) < order:
        ones = torch.ones(order, order, dtype=dtype, device=device).tril()
        _largest[dtype, device] = ones
    return ones[:order, :order]


def triangle_trace(packed: Tensor) -> Tensor:
    """Return the trace `[]` of the matrix that `packed` holds."""
    _, first, second = _fold(packed)
    return first.diagonal(dim1=-2, dim2=-1).sum(-1) + second.diagonal(dim1=-2, dim2=-1).sum(-1)


def _fold(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views: the lower left block, and squares for the two diagonal blocks' triangles."""
    rows, columns = packed.shape[-2:]
    even = rows == 2 * columns + 1
    order = rows - 1 if even else rows
    lower_left, diagonal = packed[..., : order - columns, :], packed[..., order - columns :, :]
    if even:
        return lower_left, diagonal[..., 1:, :], diagonal[..., :-1, :]
    return lower_left, diagonal, diagonal[..., :-1, 1:]
