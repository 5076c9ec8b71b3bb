"""Mean eigenvalues of factors, in units of which damping and rounding errors are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mpikfac.numerics import alike, triangle_trace
from mpikfac.plan import Factor

Factors = tuple[Factor, ...]


def mean_eigenvalues(
    keys: Iterable[Factors], packed: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[Factors, Tensor]:
    """Return, for each key (a tuple of factors), the mean eigenvalue of its factors, `[groups]`.

    The returned tensors are views of one vector. Keys whose factors are not all in `packed` are
    left out.

    Args:
        packed: triangles of factors, by name.
    """
    present = [key for key in dict.fromkeys(keys) if all(f.name in packed for f in key)]
    if not present:
        return {}
    traces = _traces({f for key in present for f in key}, packed, dtype)
    sums = [sum((traces[f] for f in key[1:]), start=traces[key[0]]) for key in present]
    groups = [key[0].groups for key in present]
    orders = [sum(f.size for f in key) for key in present]
    vector = torch.cat(sums) * repeated(groups, groups, sums[0]) / repeated(orders, groups, sums[0])
    return dict(zip(present, vector.split(groups)))


def repeated(numbers: Iterable[float], groups: Iterable[int], tensor: Tensor) -> Tensor:
    """Return each number, once per group, on `tensor`'s device; the host does not wait."""
    values = [number for number, count in zip(numbers, groups) for _ in range(count)]
    return torch.tensor(values, dtype=tensor.dtype).to(tensor.device, non_blocking=True)


def _traces(
    factors: Iterable[Factor], packed: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[Factor, Tensor]:
    """Return the traces of factors, `[groups]`."""
    named = {factor.name: factor for factor in factors}
    sums = {}
    for names in alike({name: packed[name] for name in named}):
        traces = triangle_trace(torch.stack([packed[name] for name in names]).to(dtype))
        for name, trace in zip(names, traces):
            groups = named[name].groups
            sums[named[name]] = trace.reshape(groups, -1).sum(1) if trace.dim() else trace.view(1)
    return sums
