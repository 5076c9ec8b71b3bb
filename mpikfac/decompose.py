"""Decompositions of Kronecker factors: eigenbases, and damped inverses. Pure functions.

A factor is symmetric and positive semidefinite, `[n, n]`, or several of them, `[count, n, n]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mpikfac.kron import product, unfold_triangle
from mpikfac.shapes import BLOCKS, Solver, few
from mpikfac.troubles import all_finite

LEAF = 192  # order up to which a block is left to LAPACK
TOLERANCE = 1e-3  # of an inverse by blocks: relative error of the directions that it gives
ITERATIONS = 4  # products with a factor that lead to the range of its leading eigenvectors
SPARE = 16  # vectors that are iterated beside those that are kept
RESIDUAL = 1e-2  # of leading eigenvectors, relative to the factor's norm
PROBES = 8  # vectors that look for what has grown outside of older eigenvectors


def decompositions(
    factors: Mapping[str, Tensor],
    added: Mapping[str, Tensor],
    solvers: Mapping[str, Solver],
    kept: Mapping[str, int],
) -> Iterator[tuple[str, Tensor]]:
    """The blocks of factors (triangles or vectors, by name), by name, one by one.

    They are NaN where a factor cannot be decomposed.

    Args:
        added: what is added to the diagonal of each that is inverted, `[]` or `[groups]`.
        solvers: what is made of each.
        kept: number of eigenvectors of each of which only some are kept.
    """
    for name, packed in factors.items():
        solver = solvers[name]
        for dtype, more in _attempts(packed.dtype, solver):
            damping = added[name].to(dtype) * more if name in added else 0.0
            made = _blocks(packed.to(dtype), damping, solver, kept.get(name))
            made = {kind: block.to(packed.dtype) for kind, block in made.items()}
            if all(map(all_finite, made.values())):
                break
        yield from ((f"{name}.{kind}", block) for kind, block in made.items())


def _attempts(own: torch.dtype, solver: Solver) -> Iterable[tuple[torch.dtype, float]]:
    """How a factor is decomposed, until it works: in which dtype, and damped how much more."""
    more = 10.0 if "inverse" in BLOCKS[solver] else 1.0  # others hold no damping
    return dict.fromkeys([(own, 1.0), (torch.float64, 1.0), (torch.float64, more)])


def _blocks(
    packed: Tensor, damping: float | Tensor, solver: Solver, rank: int | None
) -> dict[str, Tensor]:
    """What a factor is decomposed into, by kind; NaN where it cannot be decomposed."""
    if solver == "rank-one":
        return {"vector": packed}
    factor = unfold_triangle(packed)
    try:
        if "values" in BLOCKS[solver]:
            values, vectors = leading_eigenbasis(factor, rank) if rank else eigenbasis(factor)
            return {"values": values, "vectors": vectors}
        return {"inverse": damped_inverse(factor, damping)}
    except ArithmeticError:
        nothing = torch.full_like(factor, torch.nan)
        square, vector = nothing[..., :rank], nothing[..., 0, : rank + 1 if rank else None]
        dimensions = BLOCKS[solver].items()
        return {block: square if number == 2 else vector for block, number in dimensions}


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


def leading_eigenbasis(factor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Values `[1 + rank]` and the `rank` leading eigenvectors `[n, rank]` of a factor.

    The first value is the mean of the eigenvalues of all other vectors, so that the trace is the
    factor's. The other values are in ascending order.

    By iteration [Halko et al. 2011, 4.4 and 5.3] where few vectors are asked for and these are
    eigenvectors up to `RESIDUAL`; else those of `eigenbasis`.

    Raises:
        ArithmeticError: as `eigenbasis`.
    """
    found = _by_iteration(factor, rank) if few(rank, factor.shape[-1]) else None
    values, vectors = found or eigenbasis(factor)
    return _with_mean(factor, values[..., -rank:]), vectors[..., -rank:].contiguous()


def _by_iteration(factor: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """The leading eigenvalues and eigenvectors as a range holds them; None if that is not good.

    Good are residuals that are short: there are eigenvalues as close to these. That they are the
    largest, or hardly less, is the start's doing, which has a part of every eigenvector.
    """
    basis = _range(factor, rank + SPARE, ITERATIONS)
    image = product(factor, basis)
    values, turned = (part[..., -rank:] for part in eigenbasis(product(basis.mT, image)))
    vectors = product(basis, turned)
    residual = product(image, turned) - vectors * values[..., None, :]
    good = residual.norm(dim=(-2, -1)) <= RESIDUAL * factor.norm(dim=(-2, -1))  # not so if NaN
    return (values, vectors) if good.all() else None


def _range(factor: Tensor, vectors: int, times: int, beside: Tensor | None = None) -> Tensor:
    """An orthonormal basis `[n, vectors]` of what products with the factor make of a fixed start.

    Args:
        beside: eigenvectors whose range is left out.
    """
    order = factor.shape[-1]
    own = torch.Generator().manual_seed(0)  # torch's generator belongs to the program
    start = torch.randn(order, min(vectors, order), generator=own, device="cpu")
    basis = start.to(factor)
    for _ in range(times):
        image = product(factor, basis)
        basis = torch.linalg.qr(image if beside is None else _outside(beside, image)).Q
    return basis


def _outside(vectors: Tensor, matrix: Tensor) -> Tensor:
    return matrix - product(vectors, product(vectors.mT, matrix))


def _with_mean(factor: Tensor, values: Tensor) -> Tensor:
    """The mean of all other eigenvalues before these."""
    order, rank = factor.shape[-1], values.shape[-1]
    others = factor.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) - values.sum(-1, keepdim=True)
    return torch.cat([(others / (order - rank)).clamp_(min=0), values], -1)


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

    Of leading eigenvectors `[n, rank]` the values are `[1 + rank]`, the mean of the others first,
    and by as much as an eigenvalue outside exceeds the smallest one, the misfit is larger: a few
    probes look for it.
    """
    rotated = product(factor, vectors)
    values = (rotated * vectors).sum(-2)
    left_over = rotated.sub_(vectors * values[..., None, :]).norm()
    values.clamp_(min=0)
    if vectors.shape[-1] < factor.shape[-1]:
        left_over = torch.hypot(left_over, _grown(factor, vectors, values).norm())
        values = _with_mean(factor, values)
    return values, (left_over / factor.norm()).item()


def _grown(factor: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    """By how much an eigenvalue outside of these vectors is larger than one of theirs, `[]`.

    At least: no Rayleigh quotient of the probes is larger than the largest eigenvalue there.
    """
    # What rounding has left of these vectors in the range would count as outside of them.
    probes = _outside(vectors, _range(factor, PROBES, ITERATIONS, vectors))
    largest = (probes * product(factor, probes)).sum(-2).amax(-1)
    return (largest - values.amin(-1)).clamp_(min=0)


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
