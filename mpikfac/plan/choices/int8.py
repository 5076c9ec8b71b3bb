"""Blocks of 16 values with a common exponent and 8 bits per value.

The exponent is taken from the block's largest value; values are multiples of `2^exponent / 64`.
The format is OCP's MXINT8 with shorter blocks: no block spans two layers, because the
values of different layers can differ by orders of magnitude. Values that are not finite in float32
become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpikfac.plan.choices.compression import Compressor
from mpikfac.plan.codec import IN_SHARDS, Codec
from mpikfac.plan.layout import ALIGNMENT, Layout

if TYPE_CHECKING:
    from torch import Tensor

NOT_FINITE = -128  # encodes NaN; finite values are encoded as -127 to 127


class Int8Codec(Codec):
    """Encode each block as an exponent and 8-bit integers."""

    name: ClassVar[str] = "int8"
    everywhere: ClassVar[str] = IN_SHARDS

    def size(self, elements: int, itemsize: int) -> int:
        """Return the size in bytes of `elements` encoded values."""
        return elements + elements // ALIGNMENT

    def encode(self, values: Tensor) -> Tensor:
        """Return `values` `[n]` as bytes `[17 n / 16]`."""
        import torch

        blocks = values.float().view(-1, ALIGNMENT)
        finite = blocks.isfinite()
        blocks = blocks.where(finite, 0)
        largest = blocks.abs().amax(1, keepdim=True)
        # The exponent is at least 7, so that units are not subnormal.
        exponents = (largest.view(torch.int32) >> 23).clamp_(min=7)
        numbers = (blocks * _power(260 - exponents)).round_().clamp_(-127, 127)
        encoded = torch.empty(len(blocks), 1 + ALIGNMENT, dtype=torch.uint8, device=values.device)
        encoded[:, :1] = exponents
        encoded.view(torch.int8)[:, 1:] = numbers.where(finite, NOT_FINITE)
        return encoded.view(-1)

    def add_decoded(self, total: Tensor, encoded: Tensor, weight: int) -> None:
        """Add the decoded values, times `weight`, to `total` `[n]`, in place."""
        import torch

        blocks = encoded.view(-1, 1 + ALIGNMENT)
        units = _power(blocks[:, :1].int() - 6).to(total.dtype)
        numbers = blocks.view(torch.int8)[:, 1:].to(total.dtype)
        numbers.masked_fill_(numbers == NOT_FINITE, torch.nan)
        total.view(-1, ALIGNMENT).addcmul_(numbers, units, value=weight)


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(Compressor):
    """Send 8 bits per value and an exponent per 16 values; errors are added to the next values."""

    name: ClassVar[str] = "int8"

    def codec(self, layout: Layout, feedback: bool) -> Codec:
        """Return the encoding of an arena."""
        return Int8Codec(feedback=feedback)


def _power(exponents: Tensor) -> Tensor:
    """Return 2 to the power of `exponents - 127`, from the bits of a float32."""
    import torch

    return (exponents << 23).view(torch.float32)
