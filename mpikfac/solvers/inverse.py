"""TODO solvers.inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.numerics import Side, from_left, from_right, product


def precondition_by_inverse(gradient: Tensor, input_inverse: Side, output_inverse: Side) -> Tensor:
    """`G^-1 gradient A^-1` `[outputs, inputs]` with damped inverses, computed in their dtype."""
    dtype = (*input_inverse, *output_inverse)[0].dtype
    # The input inverse is symmetric: its transpose is what `product` takes without a copy.
    return from_right(from_left(output_inverse, gradient.to(dtype)), input_inverse, transpose=True)


LEAF = 192  # order up to which a block is left to LAPACK
TOLERANCE = 1e-3  # of an inverse by blocks: relative error of the directions that it gives


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """`(factor + damping I)^-1` `[n, n]`, by blocks where that is fast and accurate, or Cholesky.

    Args:
        damping: for all, or `[count]` for each.

    Raises:
        ArithmeticError: that matrix is not finite or not positive definite.
    """
    damped = damp(factor, damping)
    if damped.is_cpu and damped.dtype == torch.float32 and damped.dim() == 2 and len(damped) > LEAF:
        inverse = _inverse_by_blocks(damped)
        if error_of_inverse(damped, inverse) < TOLERANCE:  # not so if it is NaN
            return inverse
    root, failed = torch.linalg.cholesky_ex(damped)
    if failed.any() or not root.diagonal(dim1=-2, dim2=-1).isfinite().all():
        raise ArithmeticError("the damped factor is not finite or not positive definite")
    return torch.cholesky_inverse(root)


def damp(factor: Tensor, damping: float | Tensor) -> Tensor:
    """`factor + damping I` `[n, n]`."""
    damped = factor.clone()
    if isinstance(damping, Tensor) and damping.dim():  # for each group, perhaps of several
        damping = damping.repeat_interleave(len(factor) // len(damping))[:, None]
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    return damped


def _inverse_by_blocks(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix by its Schur complement, recursively.

    Nearly all of the work is in general products, which take less time than the triangular ones of
    LAPACK though they are twice as many. Rounding errors grow with the condition of the leading
    blocks, faster than in Cholesky's method: what comes of it has to be checked. It is NaN or far
    off where the matrix is not positive definite.
    """
    if len(matrix) <= LEAF:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
    half = len(matrix) // 2
    coupling = matrix[half:, :half]
    leading = _inverse_by_blocks(matrix[:half, :half])
    projected = product(coupling, leading)
    rest = _inverse_by_blocks(matrix[half:, half:] - product(projected, coupling.T))
    lower = product(rest, projected)
    inverse = torch.empty_like(matrix)
    inverse[half:, half:] = rest
    inverse[half:, :half] = lower.neg()
    inverse[:half, half:] = inverse[half:, :half].T
    inverse[:half, :half] = product(projected.T, lower).add_(leading)
    return inverse


def error_of_inverse(matrix: Tensor, inverse: Tensor) -> float:
    """Relative error of `inverse @ v` for typical `v`: residual of a few fixed vectors.

    `v^T (inverse - matrix^-1) = u^T (matrix inverse - I)` with the exact direction `u`.
    """
    # Fixed and without a pattern; torch's generator belongs to the program.
    probes = torch.arange(8.0 * matrix.shape[-1]).square_().sin_().view(8, -1).to(matrix)
    return ((probes @ matrix @ inverse - probes).norm() / probes.norm()).item()


def tikhonov_share(ratio: Tensor, damping: float) -> Tensor:
    """The part of the Kronecker product's damping that a factor takes; the other takes the rest.

    `pi sqrt(damping)` against `sqrt(damping) / pi`, with `pi^2` the `ratio` of the factors' mean
    eigenvalues, so that both are damped alike relative to their size [Martens & Grosse 2015, 6.3].
    """
    # Behind a layer initialised to zero no gradient arrives: G = 0 has no size to compare with.
    comparable = ratio.isfinite() & (ratio > 0)
    return torch.sqrt(damping * torch.where(comparable, ratio, 1.0))
