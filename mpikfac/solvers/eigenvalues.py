"""Mean eigenvalues of factors, by which dampings and rounding errors are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mpikfac.numerics import alike, triangle_trace
from mpikfac.plan import Factor

Factors = tuple[Factor, ...]


def mean_eigenvalues(
    wanted: Iterable[Factors], packed: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[Factors, Tensor]:
    """Return the mean eigenvalue of some factors of a layer together, `[groups]`, for each wanted.

    The tensors are views of one vector. Factors that are not all in `packed` are left out.

    Args:
        packed: triangles of factors, by name.
    """
    known = [some for some in dict.fromkeys(wanted) if all(one.name in packed for one in some)]
    if not known:
        return {}
    traces = _traces({one for some in known for one in some}, packed, dtype)
    sums = [sum((traces[one] for one in some[1:]), start=traces[some[0]]) for some in known]
    groups = [some[0].groups for some in known]
    orders = [sum(one.size for one in some) for some in known]
    vector = torch.cat(sums) * beside(groups, groups, sums[0]) / beside(orders, groups, sums[0])
    return dict(zip(known, vector.split(groups)))


def beside(numbers: Iterable[float], groups: Iterable[int], tensor: Tensor) -> Tensor:
    """Return the numbers, each for every group, where `tensor` lies; the host does not wait."""
    repeated = [number for number, count in zip(numbers, groups) for _ in range(count)]
    return torch.tensor(repeated, dtype=tensor.dtype).to(tensor.device, non_blocking=True)


def _traces(
    factors: Iterable[Factor], packed: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[Factor, Tensor]:
    """Return the traces of factors, `[groups]`."""
    named = {factor.name: factor for factor in factors}
    found = {}
    for names in alike({name: packed[name] for name in named}):
        traces = triangle_trace(torch.stack([packed[name] for name in names]).to(dtype))
        for name, trace in zip(names, traces):
            groups = named[name].groups
            found[named[name]] = trace.reshape(groups, -1).sum(1) if trace.dim() else trace.view(1)
    return found
