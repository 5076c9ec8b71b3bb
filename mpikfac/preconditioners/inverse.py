"""Damped inverses of factors, with the damping split between A and G or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpikfac.numerics import from_left, from_right, product
from mpikfac.plan import Combination, Form
from mpikfac.preconditioners.eigen import damping_unit
from mpikfac.preconditioners.preconditioner import Held, Means, Preconditioner

BLOCKS = {"inverse": 2}
ONE_OWNER = Combination(
    "preconditioner",
    ("inverse",),
    {"assignment.colocate_factors": True, "assignment.factor_reduction": "allreduce"},
    "the traces of A and G share out the damping, so both factors need one owner",
    any_of=True,
)
SPLIT = Form("inverse", BLOCKS, damped=True, both=True, needs=(ONE_OWNER,))
# Both kinds of inverse are one computation, of matrices with different damping.
UNSPLIT = Form("unsplit-inverse", BLOCKS, damped=True, timed_as="inverse")


@dataclass(frozen=True)
class Inverse(Preconditioner):
    """Damped inverses `(A + p I)^-1` and `(G + q I)^-1`.

    A change of damping takes effect at the next decomposition.

    Attributes:
        split: A and G share the damping, so that p q is the damping; else p and q both are the
            damping, as in published codes.
        dtype: inverses are kept, sent and multiplied in this dtype; None for the model's.
    """

    split: bool = True
    dtype: torch.dtype | None = None

    @property
    def form(self) -> Form:
        """The description for the plan."""
        return SPLIT if self.split else UNSPLIT

    def added(self, means: Means, damping: float, relative: bool) -> Tensor:
        """Return the damping of a factor, `[]` or `[groups]`.

        A factor without a partner, opposite to the identity, takes all of the damping.
        """
        if relative:
            halved = self.split and means.ratio is not None
            return damping_unit(means.factor) * (math.sqrt(damping) if halved else damping)
        if self.split and means.ratio is not None:
            return tikhonov_share(means.ratio, damping)
        return torch.full_like(means.factor, damping)

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return the damped inverse of a factor."""
        return {"inverse": damped_inverse(factor, damping)}

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return no blocks, and the error of directions by the older inverse."""
        assert damping is not None
        return {}, error_of_inverse(damp(factor, damping), blocks["inverse"])

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `G^-1 gradient A^-1` `[outputs, inputs]`, with damped inverses in their dtype."""
        a, g = held.a["inverse"], held.g["inverse"]
        # The input inverse is symmetric: its transpose is what `product` takes without a copy.
        return from_right(from_left(g, gradient.to((*a, *g)[0].dtype)), a, transpose=True)


LEAF = 192  # order up to which a block is left to LAPACK
TOLERANCE = 1e-3  # of an inverse by blocks: relative error of the directions that it gives


def damped_inverse(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return `(factor + damping I)^-1` `[n, n]`: by blocks if fast and accurate, or by Cholesky.

    The inverse of a damped matrix that is not positive definite is NaN.

    Args:
        damping: a number for all matrices, or `[count]`.
    """
    damped = damp(factor, damping)
    if damped.is_cpu and damped.dtype == torch.float32 and damped.dim() == 2 and len(damped) > LEAF:
        inverse = _inverse_by_blocks(damped)
        if error_of_inverse(damped, inverse) < TOLERANCE:  # not so if it is NaN
            return inverse
    root, failed = torch.linalg.cholesky_ex(damped)
    return torch.cholesky_inverse(root).masked_fill_(failed[..., None, None] != 0, torch.nan)


def damp(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return `factor + damping I` `[n, n]`."""
    damped = factor.clone()
    if isinstance(damping, Tensor) and damping.dim():  # for each group, perhaps of several
        damping = damping.repeat_interleave(len(factor) // len(damping))[:, None]
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    return damped


def _inverse_by_blocks(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix by the Schur complement, recursively.

    Nearly all of the work is in general products. General products take less time than LAPACK's
    triangular products, with twice the operations. Rounding errors grow with the condition of the
    leading blocks, faster than in Cholesky's method: the result has to be checked. The result is
    NaN or far off if the matrix is not positive definite.
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
    """Return the relative error `[]` of `inverse @ v` for typical `v`, by a few fixed vectors.

    `v^T (inverse - matrix^-1) = u^T (matrix inverse - I)` with the exact direction `u`.
    """
    # Fixed and without a pattern; torch's generator belongs to the program.
    probes = torch.arange(8.0 * matrix.shape[-1], device=matrix.device).square_().sin_()
    probes = probes.view(8, -1).to(matrix)
    return (probes @ matrix @ inverse - probes).norm(dim=(-2, -1)) / probes.norm()


def tikhonov_share(ratio: Tensor, damping: float) -> Tensor:
    """Return a factor's part of the Kronecker product's damping; the second factor takes the rest.

    `pi sqrt(damping)` against `sqrt(damping) / pi`, with `pi^2` the `ratio` of the factors' mean
    eigenvalues: relative to the mean eigenvalue, both factors have the same damping [Martens &
    Grosse 2015, 6.3].
    """
    # Behind a layer initialised to zero no gradient arrives: G = 0 has no size to compare with.
    comparable = ratio.isfinite() & (ratio > 0)
    return torch.sqrt(damping * torch.where(comparable, ratio, 1.0))
