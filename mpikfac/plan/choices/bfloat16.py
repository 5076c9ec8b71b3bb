"""Values rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac.plan.choices.compression import Compressor
from mpikfac.plan.codec import Codec
from mpikfac.plan.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class BFloat16Codec(Codec):
    """Encode values as bfloat16, which MPI reduces with a user-defined operation."""

    name: ClassVar[str] = "bfloat16"
    everywhere: ClassVar[str] = "Allreduce"

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of `elements` encoded values."""
        return 2 * elements

    def encode(self, values: Tensor) -> Tensor:
        """Return `values` `[n]` as bytes `[2 n]`."""
        import torch

        return values.to(torch.bfloat16).view(torch.uint8)

    def add_decoded(self, total: Tensor, encoded: Tensor, weight: int) -> None:
        """Add the decoded values, times `weight`, to `total` `[n]`, in place."""
        import torch

        total.add_(encoded.view(torch.bfloat16), alpha=weight)


@dataclass(frozen=True, kw_only=True, repr=False)
class BFloat16(Compressor):
    """Round values to 16 bits; the rounding errors are small, and are not added to later values."""

    name: ClassVar[str] = "bfloat16"

    def codec(self, layout: Layout, feedback: bool) -> Codec:
        """Return the encoding of an arena."""
        return BFloat16Codec()
