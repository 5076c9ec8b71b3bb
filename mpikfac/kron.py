"""Kronecker-factored algebra: triangles, damped solves, KL clip. Pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_triangle(packed: Tensor, matrix: Tensor, weight: float = 1.0) -> None:
    """Adds the lower triangle of a symmetric `matrix` `[n, n]`, times `weight`, to `packed`.

    The triangle is folded into a full rectangle (`layout.triangle_shape`) as LAPACK's rectangular
    full packed format does: the lower left block as it is, and below it the two diagonal blocks'
    triangles, one turned over so that they interlock. Slices only, no index tensors.
    """
    lower_left, first, second = _fold(packed)
    half = first.shape[1]
    lower_left.add_(matrix[half:, :half], alpha=weight)
    first.add_(matrix[:half, :half].tril(), alpha=weight)
    second.add_(matrix[half:, half:].triu(), alpha=weight)


def add_identity(packed: Tensor) -> None:
    """Adds the identity to the matrix that `packed` holds."""
    _, first, second = _fold(packed)
    first.diagonal().add_(1)
    second.diagonal().add_(1)


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


def mean_eigenvalue(packed: Tensor) -> Tensor:
    """The mean eigenvalue `[]` of the matrix that `packed` holds: its trace by its order."""
    lower_left, first, second = _fold(packed)
    order = len(lower_left) + first.shape[1]
    return (first.diagonal().sum() + second.diagonal().sum()) / order


def _fold(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the lower left block and of the places of the two diagonal blocks' triangles."""
    rows, columns = packed.shape
    even = rows == 2 * columns + 1
    order = rows - 1 if even else rows
    lower_left, rest = packed[: order - columns], packed[order - columns :]
    return (lower_left, rest[1:], rest[:-1]) if even else (lower_left, rest, rest[:-1, 1:])


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, by the faster of two libraries.

    On processors that are not Intel's, oneDNN multiplies float32 matrices twice as fast as MKL,
    which `@` calls. It takes the second one transposed: copying it has to pay off, too.
    """
    enough_rows = b.T.is_contiguous() or len(a) >= 256
    if a.is_cpu and a.dtype == torch.float32 and enough_rows and a.numel() * b.shape[1] >= 2**24:
        return F.linear(a.to_mkldnn(), b.T.contiguous().to_mkldnn()).to_dense()
    return a @ b


def damped_denominators(
    input_values: Tensor, output_values: Tensor, damping: float, out: Tensor
) -> None:
    """`out` `[outputs, inputs]` becomes the eigenvalues of `G (x) A + damping I`.

    Damping is added to the products of eigenvalues, so it may change at every step without a new
    decomposition [Pauloski et al., SC20, eq. 13-15].
    """
    torch.mul(output_values[:, None], input_values, out=out)
    out += damping


def precondition(
    gradient: Tensor, input_vectors: Tensor, output_vectors: Tensor, denominators: Tensor
) -> Tensor:
    """`(G (x) A + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    Computed in the vectors' dtype, but for the division.
    """
    dtype = input_vectors.dtype
    rotated = product(product(output_vectors.T, gradient.to(dtype)), input_vectors)
    rotated = (rotated / denominators).to(dtype)
    return product(product(output_vectors, rotated), input_vectors.T)


def precondition_by_inverse(
    gradient: Tensor, input_inverse: Tensor, output_inverse: Tensor
) -> Tensor:
    """`G^-1 gradient A^-1` `[outputs, inputs]` with damped inverses, computed in their dtype."""
    # The input inverse is symmetric: its transpose is what `product` takes without a copy.
    return product(product(output_inverse, gradient.to(input_inverse.dtype)), input_inverse.T)


def precondition_by_vectors(
    gradient: Tensor, input_vector: Tensor, output_vector: Tensor, damping: float
) -> Tensor:
    """`(g g^T (x) a a^T + damping I)^-1` applied to `gradient`, all `[outputs, inputs]`.

    By the Sherman-Morrison formula [Zhang et al. 2023, Eva].
    """
    along = output_vector @ gradient @ input_vector
    size = output_vector.square().sum() * input_vector.square().sum()
    coefficients = output_vector * (along / (size + damping))
    return torch.addr(gradient, coefficients, input_vector, alpha=-1) / damping


def kl_scale(divergence: Tensor, kl_clip: float) -> Tensor:
    """Factor `[1]` that keeps a step's squared Fisher norm at `kl_clip` at most.

    Args:
        divergence: sum over layers of `lr^2 <direction, gradient>`, `[1]` [SC20, eq. 18].
    """
    return torch.sqrt(kl_clip / divergence.abs()).clamp_(max=1.0)
