"""Inverses of damped symmetric matrices, and how K-FAC splits the damping between two factors."""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.numerics.products import product

LEAF = 192  # the order up to which a block is inverted by LAPACK
TOLERANCE = 1e-3  # the largest relative error of directions from a blockwise inverse


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return `(factor + damping I)^-1` `[n, n]`, computed blockwise if that is fast and accurate.

    Otherwise, the inverse is computed from a Cholesky decomposition.

    If the damped matrix is not positive definite, its inverse is NaN.

    Args:
        damping: one value for all matrices, or `[count]` values, each for equally many consecutive
            matrices.
    """
    damped = damp(factor, damping)
    if damped.is_cpu and damped.dtype == torch.float32 and damped.dim() == 2 and len(damped) > LEAF:
        inverse = _inverse_by_blocks(damped)
        if error_of_inverse(damped, inverse) < TOLERANCE:  # false if it is NaN
            return inverse
    root, failed = torch.linalg.cholesky_ex(damped)
    return torch.cholesky_inverse(root).masked_fill_(failed[..., None, None] != 0, torch.nan)


def damp(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return `factor + damping I` `[n, n]`."""
    damped = factor.clone()
    if isinstance(damping, Tensor) and damping.dim():  # one value for several matrices
        damping = damping.repeat_interleave(len(factor) // len(damping))[:, None]
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    return damped


def _inverse_by_blocks(matrix: Tensor) -> Tensor:
    """Invert a positive definite matrix recursively, using Schur complements.

    Nearly all of the work is in general matrix products. Although they need twice as many
    operations, they take less time than LAPACK's triangular products. Rounding errors grow with the
    condition number of the leading blocks, faster than in Cholesky's method, so the result must be
    checked. It is NaN or far off if the matrix is not positive definite.
    """
    if len(matrix) <= LEAF:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)
    half = len(matrix) // 2
    coupling = matrix[half:, :half]
    leading = _inverse_by_blocks(matrix[:half, :half])
    projected = product(coupling, leading)
    trailing = _inverse_by_blocks(matrix[half:, half:] - product(projected, coupling.T))
    lower = product(trailing, projected)
    leading = product(projected.T, lower).add_(leading)
    inverse = torch.empty_like(matrix)
    torch.cat([leading, -lower.T], 1, out=inverse[:half])
    torch.cat([-lower, trailing], 1, out=inverse[half:])
    return inverse


def error_of_inverse(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Return the relative error `[]` of `inverse @ v` for typical `v`, from a few fixed vectors.

    `v^T (inverse - matrix^-1) = u^T (matrix inverse - I)`, where `u = matrix^-1 v` is the exact
    direction.
    """
    # Fixed vectors without a pattern, because torch's global generator belongs to the program.
    probes = torch.arange(8.0 * matrix.shape[-1], device=matrix.device).square_().sin_()
    probes = probes.view(8, -1).to(matrix)
    return (probes @ matrix @ inverse - probes).norm(dim=(-2, -1)) / probes.norm()


def tikhonov_share(ratio: Tensor, damping: float) -> Tensor:
    """Return a factor's share of a Kronecker product's damping; the other factor gets the rest.

    The shares are `pi sqrt(damping)` and `sqrt(damping) / pi`, where `pi^2` is the `ratio` of the
    factors' mean eigenvalues. Each factor's share is then the same multiple of its mean eigenvalue
    [Martens & Grosse 2015, 6.3].
    """
    # No gradient passes through a layer initialised to zero: with G = 0, there is no ratio.
    comparable = ratio.isfinite() & (ratio > 0)
    return torch.sqrt(damping * torch.where(comparable, ratio, 1.0))
