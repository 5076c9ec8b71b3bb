"""Decompositions of Kronecker factors: eigenbases, and damped inverses. Pure functions.

A factor is symmetric and positive semidefinite, `[n, n]`, or several of them, `[count, n, n]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mpikfac.numerics import all_finite, unfold_triangle
from mpikfac.plan import BLOCKS, Solver
from mpikfac.solvers.eigen import eigenbasis, leading_eigenbasis
from mpikfac.solvers.inverse import damped_inverse


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
