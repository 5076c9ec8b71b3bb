"""Kronecker-factored algebra: triangles, eigenbases, damped solves, KL clip. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def add_triangle(packed: Tensor, matrix: Tensor) -> None:
    """Adds the lower triangle of a symmetric `matrix` `[n, n]` to its folded form `packed`.

    The triangle is folded into a full rectangle (`layout.triangle_shape`) as LAPACK's rectangular
    full packed format does: the lower left block as it is, and below it the two diagonal blocks'
    triangles, one turned over so that they interlock. Slices only, no index tensors.
    """
    lower_left, first, second = _fold(packed)
    half = first.shape[1]
    lower_left += matrix[half:, :half]
    first += matrix[:half, :half].tril()
    second += matrix[half:, half:].triu()


def unfold_triangle(packed: Tensor) -> Tensor:
    """The symmetric matrix `[n, n]` that `packed` holds."""
    lower_left, first, second = _fold(packed)
    half = first.shape[1]
    order = half + len(lower_left)
    matrix = packed.new_empty(order, order)
    matrix[half:, :half] = lower_left
    matrix[:half, half:] = lower_left.T
    matrix[:half, :half] = first.tril() + first.tril(-1).T
    matrix[half:, half:] = second.triu() + second.triu(1).T
    return matrix


def _fold(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the lower left block and of the places of the two diagonal blocks' triangles."""
    rows, columns = packed.shape
    even = rows == 2 * columns + 1
    order = rows - 1 if even else rows
    lower_left, rest = packed[: order - columns], packed[order - columns :]
    return (lower_left, rest[1:], rest[:-1]) if even else (lower_left, rest, rest[:-1, 1:])


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[n]`, not negative, and eigenvectors `[n, n]` (columns) of a factor.

    Raises:
        ArithmeticError: the factor, or what comes of it, is not finite.
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # LAPACK's float32 iteration may not converge on factors with many zero rows (inputs that
        # are never active); in float64 it does.
        if not factor.isfinite().all():
            raise ArithmeticError("the factor is not finite") from None
        values, vectors = (part.to(factor.dtype) for part in torch.linalg.eigh(factor.double()))
    if not values.isfinite().all():
        raise ArithmeticError("the eigenvalues are not finite")
    return values.clamp_(min=0), vectors


def precondition(
    gradient: Tensor,
    input_basis: tuple[Tensor, Tensor],
    output_basis: tuple[Tensor, Tensor],
    damping: float,
    out: Tensor,
) -> None:
    """`out` becomes `(G (x) A + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    Damping is added to the products of eigenvalues, so it may change at every step without a new
    decomposition [Pauloski et al., SC20, eq. 13-15].

    Args:
        input_basis: eigenvalues and eigenvectors of A.
        output_basis: eigenvalues and eigenvectors of G.
    """
    (a_values, a_vectors), (g_values, g_vectors) = input_basis, output_basis
    rotated = g_vectors.T @ gradient @ a_vectors
    rotated /= torch.outer(g_values, a_values).add_(damping)
    torch.mm(g_vectors @ rotated, a_vectors.T, out=out)


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """`(factor + damping I)^-1` `[n, n]`, by Cholesky.

    Raises:
        ArithmeticError: that matrix is not finite or not positive definite.
    """
    damped = factor.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if failed or not root.diagonal().isfinite().all():
        raise ArithmeticError("the damped factor is not finite or not positive definite")
    return torch.cholesky_inverse(root)


def tikhonov_share(factor: Tensor, other: Tensor, damping: float) -> Tensor:
    """The part `[]` of the Kronecker product's damping that `factor` takes; `other` the rest.

    `pi sqrt(damping)` against `sqrt(damping) / pi`, with `pi^2` the ratio of the factors' mean
    eigenvalues, so that both are damped alike relative to their size [Martens & Grosse 2015, 6.3].
    """
    mean, other_mean = (matrix.diagonal().mean() for matrix in (factor, other))
    ratio = mean / other_mean
    # Behind a layer initialised to zero no gradient arrives: G = 0 has no size to compare with.
    comparable = ratio.isfinite() & (ratio > 0)
    return torch.sqrt(damping * torch.where(comparable, ratio, 1.0))


def precondition_by_inverse(
    gradient: Tensor, input_inverse: Tensor, output_inverse: Tensor, out: Tensor
) -> None:
    """`out` becomes `G^-1 gradient A^-1`, all `[outputs, inputs]`, with damped inverses."""
    torch.mm(output_inverse @ gradient, input_inverse, out=out)


def kl_scale(divergence: Tensor, kl_clip: float) -> Tensor:
    """Factor `[]` that keeps a step's squared Fisher norm at `kl_clip` at most.

    Args:
        divergence: sum over layers of `lr^2 <direction, gradient>`, `[]` [SC20, eq. 18].
    """
    return torch.sqrt(kl_clip / divergence.abs()).clamp_(max=1.0)
