"""Kronecker-factored algebra: triangles, damped solves, KL clip. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
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


def trace(packed: Tensor) -> Tensor:
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


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, by the faster of two libraries.

    On processors that are not Intel's, oneDNN multiplies float32 matrices twice as fast as MKL,
    which `@` calls. It takes the second one transposed: copying it has to pay off, too.
    """
    if a.dim() > 2 or not a.is_cpu or a.dtype != torch.float32:
        return a @ b
    enough_rows = b.T.is_contiguous() or len(a) >= 256
    if enough_rows and a.numel() * b.shape[1] >= 2**24:
        return F.linear(a.to_mkldnn(), b.T.contiguous().to_mkldnn()).to_dense()
    return a @ b


# -- a layer's gradient between its factors -------------------------------------------------------

Side = Sequence[Tensor]
"""What stands for A or for G: the blocks along its diagonal, `[n, n]`, or one diagonal `[n]`; none
for the identity. With groups, `[groups, n, n]`, as the gradient is `[groups, outputs, inputs]`.

A block of low rank, U `[n, rank]`, stands for `[I U]` `[n, n + rank]`: what is multiplied by its
transpose is kept, and has its coordinates in U beside it."""


def from_left(side: Side, matrix: Tensor, transpose: bool = False) -> Tensor:
    """`S @ matrix`, or with its transpose, where S is what the side stands for."""
    multiply = partial(_block_from_left, transpose=transpose)
    return _block_by_block(multiply, side, matrix, -2, _rows if transpose else _columns)


def from_right(matrix: Tensor, side: Side, transpose: bool = False) -> Tensor:
    """`matrix @ S`, or with its transpose, where S is what the side stands for."""
    multiply = partial(_block_from_right, transpose=transpose)
    return _block_by_block(multiply, side, matrix, -1, _columns if transpose else _rows)


def _block_by_block(
    multiply: Callable[[Tensor, Tensor], Tensor],
    side: Side,
    matrix: Tensor,
    dim: int,
    length: Callable[[Tensor], int],
) -> Tensor:
    """The matrix with each of its parts along `dim` multiplied by its block, which say how long."""
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


def damped_denominators(
    input_values: Side,
    output_values: Side,
    damping: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """`out` `[outputs, inputs]` becomes the eigenvalues of `G (x) A + damping I`.

    Sides are those of the eigenvalues: `[n]`, or of a block of low rank `[1 + rank]`, the one that
    all other directions share before those of its vectors. `out` is as much smaller. `scales`, if
    given, stand for the products.

    Damping is added to the products of eigenvalues, so it may change at every step without a new
    decomposition [Pauloski et al., SC20, eq. 13-15].
    """
    _undamped(input_values, output_values, out, scales)
    out += damping


def relatively_damped_denominators(
    input_values: Side,
    output_values: Side,
    input_means: Side,
    output_means: Side,
    damping: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """As `damped_denominators`, with the damping in units of the mean eigenvalue of `G (x) A`.

    Means are those of `mean_eigenvalues`: of a side in blocks, each block of the product is damped
    by its own.
    """
    means = torch.empty_like(out)
    products_of_values(input_means, output_means, means)
    _undamped(input_values, output_values, out, scales)
    out.add_(means, alpha=damping)


def damping_unit(mean: Tensor) -> Tensor:
    """What damping is relative to: the mean eigenvalue, or 1 for a factor of zeros."""
    return torch.where(mean > 0, mean, 1.0)


def mean_eigenvalues(values: Side, vectors: Side) -> list[Tensor]:
    """In the place of each eigenvalue, the mean of its block; 1 for a block of zeros."""
    means = []
    for own, basis in zip(values, vectors):
        order = basis.shape[own.dim() - 1]
        shared = (order - own.shape[-1]) * own[..., :1]  # of low rank, the first one counts again
        mean = (own.sum(-1, keepdim=True) + shared) / order
        means.append(damping_unit(mean).expand_as(own))
    return means


def _undamped(input_values: Side, output_values: Side, out: Tensor, scales: Tensor | None) -> None:
    if scales is None:
        products_of_values(input_values, output_values, out)
    else:
        out.copy_(scales)


def products_of_values(input_values: Side, output_values: Side, out: Tensor) -> None:
    """`out` `[outputs, inputs]` becomes the products of both sides' values."""
    a = torch.cat(tuple(input_values), -1) if input_values else out.new_ones(out.shape[-1])
    g = torch.cat(tuple(output_values), -1) if output_values else out.new_ones(out.shape[-2])
    torch.mul(g[..., :, None], a[..., None, :], out=out)


def precondition(
    gradient: Tensor, input_vectors: Side, output_vectors: Side, denominators: Tensor
) -> Tensor:
    """`(G (x) A + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    Computed in the vectors' dtype, but for the division. The denominators are those of
    `damped_denominators`.
    """
    dtype = (*input_vectors, *output_vectors)[0].dtype
    rotated = from_left(output_vectors, gradient.to(dtype), transpose=True)
    rotated = from_right(rotated, input_vectors)
    if rotated.shape == denominators.shape:
        rotated = rotated / denominators
    else:
        weights = _of_coordinates(denominators.reciprocal(), input_vectors)
        rotated = rotated * _of_coordinates(weights.mT, output_vectors).mT
    return from_right(from_left(output_vectors, rotated.to(dtype)), input_vectors, transpose=True)


def _of_coordinates(weights: Tensor, vectors: Side) -> Tensor:
    """What coordinates `[I U]` are multiplied by, so that vectors are by `weights` (last dim).

    `w_rest (I - U U^T) + U diag(w) U^T` is `w_rest I + U diag(w - w_rest) U^T`: no projection that
    would have to be multiplied out, and no denominators for each direction outside of U.
    """
    return _block_by_block(_of_block, vectors, weights, -1, _values)


def _of_block(block: Tensor, weights: Tensor) -> Tensor:
    if block.dim() < weights.dim() or _rows(block) == block.shape[-1]:
        return weights
    rest, own = weights[..., :1], weights[..., 1:]
    return torch.cat([rest.expand(*rest.shape[:-1], _rows(block)), own - rest], -1)


def precondition_by_inverse(gradient: Tensor, input_inverse: Side, output_inverse: Side) -> Tensor:
    """`G^-1 gradient A^-1` `[outputs, inputs]` with damped inverses, computed in their dtype."""
    dtype = (*input_inverse, *output_inverse)[0].dtype
    # The input inverse is symmetric: its transpose is what `product` takes without a copy.
    return from_right(from_left(output_inverse, gradient.to(dtype)), input_inverse, transpose=True)


def precondition_by_vectors(
    gradient: Tensor, input_vector: Side, output_vector: Side, damping: float
) -> Tensor:
    """`(g g^T (x) a a^T + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    By the Sherman-Morrison formula [Zhang et al. 2023, Eva].
    """
    along, size = gradient, gradient.new_ones(())
    if input_vector:
        a = torch.cat(tuple(input_vector), -1)[..., None, :]
        along, size = along @ a.mT, size * a.square().sum(-1, keepdim=True)
    if output_vector:
        g = torch.cat(tuple(output_vector), -1)[..., :, None]
        along, size = g.mT @ along, size * g.square().sum(-2, keepdim=True)
    away = along / (size + damping)
    away = g * away if output_vector else away
    return (gradient - (away * a if input_vector else away)) / damping


def grafted(direction: Tensor, length: Tensor) -> Tensor:
    """The direction at that length `[]` [Agarwal et al. 2020]; one of zeros as it is."""
    own = direction.norm()
    return direction * torch.where(own > 0, length / own, 1.0)


def clip_scale(square: Tensor, bound: float) -> Tensor:
    """Factor `[1]` that keeps the square of a step's norm at `bound` at most.

    Args:
        square: that of a norm, `[1]`: `sum <direction, direction>` over layers, or for the KL clip
            `sum lr^2 <direction, gradient>`, which rounding may make negative [SC20, eq. 18].
    """
    return torch.sqrt(bound / square.abs()).clamp_(max=1.0)
