"""Eigenvalues and eigenvectors of factors, and directions computed from them."""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.numerics.arena import alike
from mpikfac.numerics.products import Side, from_left, from_right, of_coordinates, product
from mpikfac.plan import few

ITERATIONS = 4  # the number of products with a factor to find its leading eigenvectors
SPARE = 16  # the number of vectors iterated in addition to those that are kept
RESIDUAL = 1e-2  # the maximum residual of leading eigenvectors, relative to the factor's norm
PROBES = 8  # the number of vectors that detect growth orthogonal to the previous eigenvectors


def damped_denominators(
    input_values: Side,
    output_values: Side,
    damping: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Write the eigenvalues of `G (x) A + damping I` to `out` `[outputs, inputs]`.

    `input_values` and `output_values` contain the eigenvalues of the blocks of A and G: `[n]` or,
    for a block of low rank, `[1 + rank]`, where the first value applies to all directions
    orthogonal to the kept eigenvectors; `out` is then smaller. `scales`, if given, replace the
    products of eigenvalues.

    The damping is added to the products of eigenvalues, so it can change in every step without a
    new decomposition [Pauloski et al., SC20, eq. 13-15].
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
    """Write `damped_denominators`, with the damping in units of the mean eigenvalue of `G (x) A`.

    The means come from `mean_eigenvalues`: if a side has blocks, each block of the product is
    damped in units of its own mean eigenvalue.
    """
    a, g = _whole(input_means, out, -1), _whole(output_means, out, -2)
    _undamped(input_values, output_values, out, scales)
    out.addcmul_(g[..., :, None], a[..., None, :], value=damping)


def damping_unit(mean: Tensor) -> Tensor:
    """Return the unit of relative damping: the mean eigenvalue, or 1 for a factor of zeros."""
    return mean + (mean <= 0)


def mean_eigenvalues(values: Side, vectors: Side) -> list[Tensor]:
    """Return, for every eigenvalue, the mean eigenvalue of its block; 1 for a block of zeros."""
    means = list(values)
    of_values = alike(dict(enumerate(values)))
    for places in (group for equal in of_values for group in alike({p: vectors[p] for p in equal})):
        stacked = torch.stack([values[place] for place in places])
        order, count = vectors[places[0]].shape[stacked.dim() - 2], stacked.shape[-1]
        mean = stacked.mean(-1, keepdim=True)
        if order > count:  # of low rank: the first value represents all remaining ones
            mean = torch.lerp(stacked[..., :1], mean, count / order)
        for place, unit in zip(places, damping_unit(mean)):
            means[place] = unit.expand_as(values[place])
    return means


def _undamped(input_values: Side, output_values: Side, out: Tensor, scales: Tensor | None) -> None:
    if scales is None:
        products_of_values(input_values, output_values, out)
    else:
        out.copy_(scales)


def products_of_values(input_values: Side, output_values: Side, out: Tensor) -> None:
    """Write all products of an output value and an input value to `out` `[outputs, inputs]`."""
    a = _whole(input_values, out, -1)
    g = _whole(output_values, out, -2)
    torch.mul(g[..., :, None], a[..., None, :], out=out)


def _whole(values: Side, out: Tensor, dim: int) -> Tensor:
    """Return the values of all blocks of a side, concatenated; ones for the identity."""
    if len(values) == 1:
        return values[0]
    return torch.cat(tuple(values), -1) if values else out.new_ones(out.shape[dim])


def precondition(
    gradient: Tensor, input_vectors: Side, output_vectors: Side, denominators: Tensor
) -> Tensor:
    """Return `(G (x) A + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    The products are computed in the vectors' dtype, and the division in that of the denominators,
    which come from `damped_denominators`.
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
    """Return a factor's nonnegative eigenvalues `[n]`, and its eigenvectors `[n, n]` (columns).

    Raises:
        ArithmeticError: LAPACK's iteration does not converge, as in float32 for factors with many
            zero rows (inputs that are never active).
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ArithmeticError("the eigenvalues do not converge") from error
    return values.clamp_(min=0), vectors


def leading_eigenbasis(factor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return values `[1 + rank]` and the `rank` leading eigenvectors `[n, rank]` of a factor.

    The first value is the mean of all remaining eigenvalues, which preserves the trace. The leading
    values follow in ascending order.

    A few vectors are computed by iteration [Halko et al. 2011, 4.4 and 5.3]; if there are many, or
    a residual exceeds `RESIDUAL`, `eigenbasis` computes them.

    Raises:
        ArithmeticError: see `eigenbasis`.
    """
    leading = _by_iteration(factor, rank) if few(rank, factor.shape[-1]) else None
    values, vectors = leading or eigenbasis(factor)
    return _with_mean(factor, values[..., -rank:]), vectors[..., -rank:].contiguous()


def _by_iteration(factor: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """Return leading eigenvalues and eigenvectors by iteration, or None if residuals are large.

    Each value is within its residual of a true eigenvalue. The random start has a component along
    every eigenvector, so the values found are the largest eigenvalues, or nearly so.
    """
    basis = _range(factor, rank + SPARE, ITERATIONS)
    image = product(factor, basis)
    values, turned = (part[..., -rank:] for part in eigenbasis(product(basis.mT, image)))
    vectors = product(basis, turned)
    residual = product(image, turned) - vectors * values[..., None, :]
    good = residual.norm(dim=(-2, -1)) <= RESIDUAL * factor.norm(dim=(-2, -1))  # false for NaN
    return (values, vectors) if good.all() else None


def _range(factor: Tensor, vectors: int, times: int, excluded: Tensor | None = None) -> Tensor:
    """Return an orthonormal basis `[n, vectors]` of a power of the factor times fixed vectors.

    Args:
        excluded: eigenvectors to project out of the range.
    """
    order = factor.shape[-1]
    generator = torch.Generator().manual_seed(0)  # torch's global one belongs to the program
    start = torch.randn(order, min(vectors, order), generator=generator, device="cpu")
    basis = start.to(factor)
    for _ in range(times):
        image = product(factor, basis)
        basis = torch.linalg.qr(image if excluded is None else _outside(excluded, image)).Q
    return basis


def _outside(vectors: Tensor, matrix: Tensor) -> Tensor:
    return matrix - product(vectors, product(vectors.mT, matrix))


def _with_mean(factor: Tensor, values: Tensor) -> Tensor:
    """Return `values`, preceded by the mean of all other eigenvalues of the factor."""
    order, rank = factor.shape[-1], values.shape[-1]
    others = factor.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) - values.sum(-1, keepdim=True)
    return torch.cat([(others / (order - rank)).clamp_(min=0), values], -1)


def iterated(factor: Tensor, vectors: Tensor) -> Tensor:
    """Return the vectors after one orthogonal iteration: orthonormal and closer to eigenvectors.

    The vectors with the largest eigenvalues come first, because a QR decomposition makes each
    column orthogonal to the previous ones. An iteration reduces the component of the j-th
    eigenvector in the i-th vector by the ratio of the eigenvalues, `values[j] / values[i]` for
    j > i [Golub & Van Loan 2013, 8.2.4]. Exact eigenvectors keep their directions, but signs can
    change.
    """
    image = product(factor, vectors)
    order = image.norm(dim=-2, keepdim=True).argsort(-1, descending=True)
    return torch.linalg.qr(image.take_along_dim(order, -1)).Q


def values_in_basis(factor: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues `[n]` for given eigenvectors, and the misfit `[]` of these eigenvectors.

    The values are the diagonal of `vectors^T factor vectors`. The misfit is the norm of its
    off-diagonal part, relative to the factor's norm: 0 for exact eigenvectors. One product is
    enough, since an orthogonal matrix preserves norms. For a batch of factors
    `[count, n, n]`, values and misfits have a leading dimension `count`.

    For leading eigenvectors `[n, rank]`, the values are `[1 + rank]`, with the mean of the
    remaining values first. The misfit then includes an estimate, from a few probes, of how much the
    largest remaining eigenvalue exceeds the smallest kept one.
    """
    rotated = product(factor, vectors)
    values = (rotated * vectors).sum(-2)
    left_over = rotated.sub_(vectors * values[..., None, :]).norm(dim=(-2, -1))
    values.clamp_(min=0)
    if vectors.shape[-1] < factor.shape[-1]:
        left_over = torch.hypot(left_over, _grown(factor, vectors, values))
        values = _with_mean(factor, values)
    norm = factor.norm(dim=(-2, -1)).clamp(min=torch.finfo(factor.dtype).tiny)  # 0 / tiny is 0
    return values, left_over / norm


def _grown(factor: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    """Estimate how far an eigenvalue that was not kept exceeds the smallest kept one, `[]`.

    This is a lower bound: a probe's Rayleigh quotient is at most the largest eigenvalue not kept.
    """
    # Project again, because rounding leaves components along the vectors, which would count.
    probes = _outside(vectors, _range(factor, PROBES, ITERATIONS, vectors))
    largest = (probes * product(factor, probes)).sum(-2).amax(-1)
    return (largest - values.amin(-1)).clamp_(min=0)


def squares_in_bases(a: Tensor, g: Tensor, input_vectors: Side, output_vectors: Side) -> Tensor:
    """Return `sum((Q_G^T sum(g a^T) Q_A)^2)` `[outputs, inputs]`, elementwise, over examples.

    The inner sum is over positions. For each side, either its vectors are rotated before the inner
    sum, or the rows of the sum are rotated afterwards, whichever are fewer.

    Args:
        a: `[batch, shared, inputs]`; with groups, `a` and the result have `groups` as their first
            dimension.
        g: `[batch, shared, outputs]`; with groups, like `a`.
        input_vectors: Q_A, as a `Side`; empty for the identity.
        output_vectors: Q_G, also as a `Side`.
    """
    shared, a_first, g_first = a.shape[-2], a.shape[-2] <= g.shape[-1], a.shape[-2] <= a.shape[-1]
    a = _rotated(a, input_vectors) if a_first else a
    g = _rotated(g, output_vectors) if g_first else g
    if shared == 1:
        return product(g.squeeze(-2).square().mT, a.squeeze(-2).square())
    gradients = g.mT @ a
    gradients = gradients if a_first else _rotated(gradients, input_vectors)
    gradients = gradients if g_first else _rotated(gradients.mT, output_vectors).mT
    return gradients.square().sum(-3)


def _rotated(rows: Tensor, vectors: Side) -> Tensor:
    """Return `rows Q` `[batch, rows, n]` for vectors Q; with groups, `[groups, batch, rows, n]`."""
    if not vectors:
        return rows
    return from_right(rows.flatten(-3, -2), vectors).view(rows.shape)
