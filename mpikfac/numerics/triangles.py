"""TODO numerics.triangles."""

from __future__ import annotations

from torch import Tensor


def add_triangle(packed: Tensor, matrix: Tensor, weight: float = 1.0) -> None:
    """Adds the lower triangle of a symmetric `matrix` `[n, n]`, times `weight`, to `packed`.

    The triangle is folded into a full rectangle (`layout.triangle_shape`) as LAPACK's rectangular
    full packed format does: the lower left block as it is, and below it the two diagonal blocks'
    triangles, one turned over so that they interlock. Slices only, no index tensors. Here as below,
    several matrices of one order are stacked in front: `[count, n, n]`.
    """
    lower_left, first, second = _fold(packed)
    half = first.shape[-1]
    lower_left.add_(matrix[..., half:, :half], alpha=weight)
    first.add_(matrix[..., :half, :half].tril(), alpha=weight)
    second.add_(matrix[..., half:, half:].triu(), alpha=weight)


def add_identity(packed: Tensor, weight: float | Tensor = 1.0) -> None:
    """Adds the identity, times `weight`, to the matrix that `packed` holds."""
    _, first, second = _fold(packed)
    _diagonal(first).add_(weight)
    _diagonal(second).add_(weight)


def unfold_triangle(packed: Tensor) -> Tensor:
    """The symmetric matrix `[n, n]` that `packed` holds."""
    lower_left, first, second = _fold(packed)
    half = first.shape[-1]
    order = half + lower_left.shape[-2]
    matrix = packed.new_empty(*packed.shape[:-2], order, order)
    matrix[..., half:, :half] = lower_left
    matrix[..., :half, half:] = lower_left.mT
    matrix[..., :half, :half] = first.tril() + first.tril(-1).mT
    matrix[..., half:, half:] = second.triu() + second.triu(1).mT
    return matrix


def triangle_trace(packed: Tensor) -> Tensor:
    """The trace `[]` of the matrix that `packed` holds."""
    _, first, second = _fold(packed)
    return _diagonal(first).sum(-1) + _diagonal(second).sum(-1)


def _fold(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the lower left block and of the places of the two diagonal blocks' triangles."""
    rows, columns = packed.shape[-2:]
    even = rows == 2 * columns + 1
    order = rows - 1 if even else rows
    lower_left, rest = packed[..., : order - columns, :], packed[..., order - columns :, :]
    if even:
        return lower_left, rest[..., 1:, :], rest[..., :-1, :]
    return lower_left, rest, rest[..., :-1, 1:]


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)
