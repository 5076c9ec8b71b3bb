"""Test tensors for infinity and NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def all_finite(flat: Tensor) -> bool:
    """Return whether all elements are finite, in a single pass; also False if the sum overflows."""
    return math.isfinite(flat.sum())


def each_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a mask of the finite tensors, `[tensors]`; see `all_finite`."""
    cpu = all(tensor.is_cpu for tensor in tensors)  # a GPU computes many norms in few kernels
    sums = [tensor.sum() for tensor in tensors] if cpu else torch._foreach_norm(list(tensors), 1)
    return torch.stack(sums).isfinite()


def not_finite(blocks: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the blocks that contain infinity or NaN."""
    if not blocks:
        return []
    sound = each_finite(list(blocks.values())).tolist()
    doubtful = [name for name, finite in zip(blocks, sound) if not finite]
    return [name for name in doubtful if not blocks[name].isfinite().all()]
