"""Compare the rounding errors of factors with the damping, before factors are decomposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mpikfac.engine.curvature.decomposers import Decomposition
from mpikfac.engine.nonfinite import Flags
from mpikfac.plan import Factor
from mpikfac.preconditioners import Means, Preconditioner, mean_eigenvalues, repeated

# Bounds on the errors of eigenvalues, relative to the damping.
HARMLESS = 0.01  # in a decomposition
COARSE = 100.0  # in averages; errors estimated from traces far exceed the actual ones
COARSE_DAMPED = 0.2  # in averages that are damped before the decomposition

Warn = Callable[[Sequence[str]], object]
"""Called with the names of layers, no later than when the host next reads the flags."""


def errors_of(
    decompositions: Sequence[Decomposition],
    packed: Mapping[str, Tensor],
    damping: float,
    relative: bool,
    dtype: torch.dtype,
) -> dict[Factor, float]:
    """Return the errors of eigenvalues in the dtype of the statistics, relative to the damping.

    An error is about `eps` times the largest eigenvalue of `G (x) A`, which is at most the product
    of the traces. The error is NaN if the rank lacks the factors of the opposite side.
    """
    if dtype == torch.float64:
        return dict.fromkeys((d.factor for d in decompositions), 0.0)
    sides = {d.factor: [s for s in (d.side, d.opposite) if s] for d in decompositions}
    distinct = [side for both in sides.values() for side in both]
    largest = dict.fromkeys(distinct, 1.0)
    if not relative and decompositions:
        means = mean_eigenvalues(distinct, packed, dtype)
        maxima = torch.stack([mean.max() for mean in means.values()]).tolist() if means else []
        largest = dict.fromkeys(distinct, math.nan) | dict(zip(means, maxima))
    eps = torch.finfo(dtype).eps
    return {
        factor: math.prod((_order(side) * largest[side] for side in both), start=eps / damping)
        if all(each.name in packed for side in both for each in side)
        else math.nan
        for factor, both in sides.items()
    }


def damping_added(
    decompositions: Sequence[Decomposition],
    packed: Mapping[str, Tensor],
    damping: float,
    relative: bool,
    dtype: torch.dtype,
    flags: Flags,
    warn: Warn,
) -> dict[str, Tensor]:
    """Return the damping to add to each factor before its decomposition, by the factor's name.

    It is `[]`, or `[groups]` if the layer has groups. `warn` is called with the layers of factors
    for which `eps` times the trace is large relative to the damping.
    """
    sides = [s for d in decompositions for s in ((d.factor,), d.side, d.opposite) if s]
    means = mean_eigenvalues(sides, packed, dtype)
    added: dict[str, Tensor] = {}
    kinds: dict[tuple[Preconditioner, bool], list[Decomposition]] = {}
    for decomposition in decompositions:
        both = decomposition.factor.preconditioner.both and bool(decomposition.opposite)
        kinds.setdefault((decomposition.preconditioner, both), []).append(decomposition)
    for (preconditioner, both), alike in kinds.items():
        factors = [decomposition.factor for decomposition in alike]
        of_factors = torch.cat([means[factor,] for factor in factors])
        ratio = None
        if both:
            ratio = torch.cat([means[d.side] for d in alike])
            ratio = ratio / torch.cat([means[d.opposite] for d in alike])
        dampings = preconditioner.added(Means(of_factors, ratio), damping, relative)
        groups = [factor.groups for factor in factors]
        for factor, values in zip(factors, dampings.split(groups)):
            added[factor.name] = values if len(values) > 1 else values[0]
        if dtype != torch.float64:
            eps = torch.finfo(dtype).eps
            orders = repeated([factor.order for factor in factors], groups, of_factors)
            layers = [factor.layer for factor in factors for _ in range(factor.groups)]
            coarse = eps * orders * of_factors / dampings > COARSE_DAMPED
            flags.keep(coarse, partial(_warn_marked, warn, layers))
    return added


def _warn_marked(warn: Warn, names: Sequence[str], marks: Sequence[float]) -> None:
    warn([name for name, mark in zip(names, marks) if mark])


def _order(side: tuple[Factor, ...]) -> float:
    """Return the sum of the orders of a side's factors in one group."""
    return sum(factor.size for factor in side) / side[0].groups
