"""Decompositions of Kronecker factors: eigenbases, and damped inverses. Pure functions.

A factor is symmetric and positive semidefinite, `[n, n]`, or several of them, `[count, n, n]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mpikfac.kron import product, unfold_triangle
from mpikfac.shapes import BLOCKS, Solver
from mpikfac.troubles import all_finite

LEAF = 192  # order up to which a block is left to LAPACK
TOLERANCE = 1e-3  # of an inverse by blocks: relative error of the directions that it gives


def decompositions(
    factors: Mapping[str, Tensor], added: Mapping[str, Tensor], solver: Solver
) -> Iterator[tuple[str, Tensor]]:
    """The blocks of factors (triangles or vectors, by name), by name, one by one.

    They are NaN where a factor cannot be decomposed.

    Args:
        added: what is added to the diagonal of each that is inverted, `[]` or `[groups]`.
    """
    for name, packed in factors.items():
        for dtype, more in _attempts(packed.dtype, solver):
            damping = added[name].to(dtype) * more if name in added else 0.0
            made = _blocks(packed.to(dtype), damping, solver)
            made = {kind: block.to(packed.dtype) for kind, block in made.items()}
            if all(map(all_finite, made.values())):
                break
        yield from ((f"{name}.{kind}", block) for kind, block in made.items())


def _attempts(own: torch.dtype, solver: Solver) -> Iterable[tuple[torch.dtype, float]]:
    """How a factor is decomposed, until it works: in which dtype, and damped how much more."""
    more = 10.0 if "inverse" in BLOCKS[solver] else 1.0  # others hold no damping
    return dict.fromkeys([(own, 1.0), (torch.float64, 1.0), (torch.float64, more)])


def _blocks(packed: Tensor, damping: float | Tensor, solver: Solver) -> dict[str, Tensor]:
    """What a factor is decomposed into, by kind; NaN where it cannot be decomposed."""
    if solver == "rank-one":
        return {"vector": packed}
    factor = unfold_triangle(packed)
    try:
        if "values" in BLOCKS[solver]:
            values, vectors = eigenbasis(factor)
            return {"values": values, "vectors": vectors}
        return {"inverse": damped_inverse(factor, damping)}
    except ArithmeticError:
        nothing = torch.full_like(factor, torch.nan)
        dimensions = BLOCKS[solver].items()
        return {block: nothing if number == 2 else nothing[..., 0] for block, number in dimensions}


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[n]`, not negative, and eigenvectors `[n, n]` (columns) of a factor.

    Raises:
        ArithmeticError: LAPACK's iteration does not converge, as in float32 on factors with many
            zero rows (inputs that are never active), or the factor is not finite.
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ArithmeticError("the eigenvalues do not converge") from error
    if not values.isfinite().all():  # LAPACK takes NaN for a number
        raise ArithmeticError("the eigenvalues are not finite")
    return values.clamp_(min=0), vectors


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


def values_in_basis(factor: Tensor, vectors: Tensor) -> tuple[Tensor, float]:
    """Eigenvalues `[n]` that older eigenvectors give, and how badly these fit.

    The values are the diagonal of `vectors^T factor vectors`. The misfit is the norm of the rest of
    that matrix, relative to the factor's: 0 if these are its eigenvectors. It takes one product, as
    an orthogonal matrix changes no norm.
    """
    rotated = product(factor, vectors)
    values = (rotated * vectors).sum(-2)
    left_over = rotated.sub_(vectors * values[..., None, :]).norm()
    return values.clamp_(min=0), (left_over / factor.norm()).item()


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
