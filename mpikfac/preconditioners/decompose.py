"""Decompose factors, and retry in higher precision after a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpikfac.numerics import all_finite, unfold_triangle
from mpikfac.plan import Factor
from mpikfac.preconditioners.preconditioner import Preconditioner


def decomposed_together(
    factors: Sequence[Factor],
    preconditioner: Preconditioner,
    packed: Tensor,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Decompose factors of the same order in a single call; return the blocks by name.

    Blocks can contain NaN or infinity. No blocks are returned if a factor cannot be decomposed.

    Args:
        packed: the factors as triangles, `[factors, ...]`.
        added: the damping added to the factors' diagonals, `[factors]` or `[factors, groups]`.
        dtype: the dtype of the returned blocks; None for the dtype of `packed`.
    """
    matrices = unfold_triangle(packed)
    damping = 0.0 if added is None else added.flatten()
    try:
        decomposition = preconditioner.decompose(matrices.flatten(0, -3), damping, factors[0].rank)
    except ArithmeticError:
        return {}
    kinds = {
        kind: blocks.to(dtype or packed.dtype).contiguous().unflatten(0, matrices.shape[:-2])
        for kind, blocks in decomposition.items()
    }
    return {
        name: kinds[kind][place]
        for place, factor in enumerate(factors)
        for name, kind, _ in factor.blocks
    }


def renewed_together(
    factors: Sequence[Factor],
    preconditioner: Preconditioner,
    packed: Tensor,
    older: Sequence[Mapping[str, Tensor]],
    added: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return renewed blocks of factors of the same order, by name, and misfits, `[factors]`.

    Args:
        packed: the factors as triangles, `[factors, ...]`.
        older: for each factor, the blocks of the decomposition in use, by kind.
        added: the damping added to the factors' diagonals, `[factors]` or `[factors, groups]`.
    """
    blocks = {
        kind: _of_preconditioner(
            torch.stack([blocks[kind] for blocks in older]).to(packed.dtype), dims
        )
        for kind, dims in preconditioner.form.blocks.items()
    }
    damping = None if added is None else _of_preconditioner(added, 0)
    renewed, misfits = preconditioner.renew(
        _of_preconditioner(unfold_triangle(packed), 2), blocks, damping
    )
    return {
        block.name: renewed[block.kind].view(len(factors), *block.shape)[place]
        for place, factor in enumerate(factors)
        for block in factor.blocks
        if block.kind in renewed
    }, misfits.view(len(factors), -1).amax(1)


def _of_preconditioner(stack: Tensor, dims: int) -> Tensor:
    """Return a stack as preconditioners expect it: without a leading dimension for one factor."""
    return stack.flatten(0, -dims - 1).squeeze(0)


def decomposed(
    factor: Factor, preconditioner: Preconditioner, packed: Tensor, added: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the blocks of a factor's decomposition by name ("conv1.A.vectors").

    All blocks are NaN if the factor cannot be decomposed.

    Args:
        packed: the factor as a triangle, or as a vector.
        added: the damping added to the factor's diagonal, `[]` or `[groups]`; None for no damping.
    """
    # Without damping, there is nothing to increase.
    increase = 10.0 if factor.preconditioner.damped else 1.0
    # Each attempt to decompose a factor uses a dtype and a multiple of the damping.
    attempts = [(packed.dtype, 1.0), (torch.float64, 1.0), (torch.float64, increase)]
    for dtype, times in dict.fromkeys(attempts if all_finite(packed) else []):
        precise = packed.to(dtype)
        matrix = precise if factor.preconditioner.vector else unfold_triangle(precise)
        damping = 0.0 if added is None else added.to(dtype) * times
        try:
            decomposition = preconditioner.decompose(matrix, damping, factor.rank)
        except ArithmeticError:
            continue
        blocks = {name: decomposition[kind].to(packed.dtype) for name, kind, _ in factor.blocks}
        if all(map(all_finite, blocks.values())):
            return blocks
    return {block.name: packed.new_full(block.shape, torch.nan) for block in factor.blocks}
