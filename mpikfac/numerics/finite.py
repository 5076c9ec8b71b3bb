"""TODO numerics.finite."""

from __future__ import annotations

from torch import Tensor


def all_finite(flat: Tensor) -> bool:
    """Whether `flat` holds neither infinity nor NaN (nor numbers whose sum overflows); one pass."""
    return bool(flat.sum().isfinite())


def not_finite(blocks: dict[str, Tensor]) -> list[str]:
    """Names of those blocks that hold infinity or NaN."""
    return [name for name, block in blocks.items() if not block.isfinite().all()]
