"""Eigenbases of factors: all of the damping is added to the products of eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mpikfac.numerics import Side, from_left, from_right, of_coordinates, product
from mpikfac.plan import Combination, Form, few
from mpikfac.solvers.solver import Held, Solver

ITERATIONS = 4  # products with a factor that lead to the range of its leading eigenvectors
SPARE = 16  # vectors that are iterated beside those that are kept
RESIDUAL = 1e-2  # of leading eigenvectors, relative to the factor's norm
PROBES = 8  # vectors that look for what has grown outside of older eigenvectors


LOW_RANK = Combination(
    "rank",
    None,
    {"solver": "eigen", "basis_wire": None, "basis_dtype": None},
    "some eigenvectors are kept, and only orthogonal eigenvectors say what the others do",
)


@dataclass(frozen=True)
class Eigen(Solver):
    """Eigenvalues and eigenvectors of A and G; damping may change without a new decomposition.

    Attributes:
        dtype: decompositions are kept, sent and multiplied in this dtype; None for the model's.
    """

    dtype: torch.dtype | None = None
    form: ClassVar[Form] = Form(
        "eigen", {"vectors": 2, "values": 1}, denominators=True, products=2, needs=(LOW_RANK,)
    )

    def decompose(
        self, factor: Tensor, damping: float | Tensor, rank: int | None
    ) -> dict[str, Tensor]:
        """Return eigenvalues and eigenvectors of a factor, all or the `rank` leading vectors."""
        values, vectors = leading_eigenbasis(factor, rank) if rank else eigenbasis(factor)
        return {"values": values, "vectors": vectors}

    def renew(
        self, factor: Tensor, blocks: Mapping[str, Tensor], damping: Tensor | None
    ) -> tuple[dict[str, Tensor], float]:
        """Return the eigenvalues that the older eigenvectors give, and the vectors' misfit."""
        values, misfit = values_in_basis(factor, blocks["vectors"])
        return {"values": values}, misfit

    def damp(self, held: Held, damping: float, relative: bool) -> None:
        """Write the damped products of eigenvalues to `held.denominators`."""
        out = held.denominators
        assert out is not None
        values = held.sides("values", out.dtype)
        if not relative:
            damped_denominators(*values, damping, out, held.scales)
            return
        a, g = map(mean_eigenvalues, values, (held.a["vectors"], held.g["vectors"]))
        relatively_damped_denominators(*values, a, g, damping, out, held.scales)

    def direction(self, gradient: Tensor, held: Held) -> Tensor:
        """Return `(G (x) A + damping I)^-1` applied to the gradient, `[outputs, inputs]`."""
        assert held.denominators is not None
        return precondition(gradient, held.a["vectors"], held.g["vectors"], held.denominators)


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
        weights = of_coordinates(denominators.reciprocal(), input_vectors)
        rotated = rotated * of_coordinates(weights.mT, output_vectors).mT
    return from_right(from_left(output_vectors, rotated.to(dtype)), input_vectors, transpose=True)


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
