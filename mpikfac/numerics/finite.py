"""Test tensors for infinity and NaN."""

from __future__ import annotations

from torch import Tensor


def all_finite(flat: Tensor) -> bool:
    """Return whether all of `flat` is finite, in a single pass; also False if the sum overflows."""
    return bool(flat.sum().isfinite())


def not_finite(blocks: dict[str, Tensor]) -> list[str]:
    """Return the names of the blocks that hold infinity or NaN."""
    return [name for name, block in blocks.items() if not block.isfinite().all()]
