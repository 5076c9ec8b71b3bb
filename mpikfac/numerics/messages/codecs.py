"""Encode numbers as fewer bytes, and decode: bfloat16, 8 bits by blocks, only the largest numbers.

Error feedback [Seide et al. 2014]: the error of an encoding is kept as a residual and added to the
next numbers before encoding. So sums over time lose only the last step's residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpikfac.plan import ALIGNMENT, PLACE, Codec

NOT_FINITE = -128  # among 8-bit numbers, which otherwise go from -127 to 127


def encode(values: Tensor, codec: Codec, lost: Tensor | None = None) -> Tensor:
    """Return `values` `[n]` as bytes, `[codec.size(n)]`.

    Args:
        lost: the residual `[n]` of the last encoding: added to `values`, then set to the new
            residual. Non-finite numbers are sent, but not kept in the residual.
    """
    if lost is None:
        return ENCODERS[codec.name](values, codec)
    lost += values
    encoded = ENCODERS[codec.name](lost, codec)
    add_decoded(lost, encoded, codec, -1)
    lost.nan_to_num_(0.0, 0.0, 0.0)
    return encoded


def add_decoded(total: Tensor, encoded: Tensor, codec: Codec, weight: int = 1) -> None:
    """Add the decoded numbers, times `weight`, to `total` `[n]`."""
    ADDERS[codec.name](total, encoded, weight)


def _to_bfloat16(values: Tensor, _: Codec) -> Tensor:
    return values.to(torch.bfloat16).view(torch.uint8)


def _add_bfloat16(total: Tensor, encoded: Tensor, weight: int) -> None:
    total.add_(encoded.view(torch.bfloat16), alpha=weight)


def _to_int8(values: Tensor, _: Codec) -> Tensor:
    """Return blocks of an exponent and 8-bit numbers.

    The exponent is the exponent of the block's largest number; numbers are in units of 1/64 of 2 to
    the exponent. The format is OCP's MXINT8 with shorter blocks: a block never spans two layers,
    because numbers of two layers may be many orders of magnitude apart. Numbers that are not finite
    in float32 become NaN.
    """
    blocks = values.float().view(-1, ALIGNMENT)
    finite = blocks.isfinite()
    blocks = blocks.where(finite, 0)
    largest = blocks.abs().amax(1, keepdim=True)
    exponents = (largest.view(torch.int32) >> 23).clamp_(min=7)  # units are no subnormal numbers
    numbers = (blocks * _power(260 - exponents)).round_().clamp_(-127, 127)
    encoded = torch.empty(len(blocks), 1 + ALIGNMENT, dtype=torch.uint8, device=values.device)
    encoded[:, :1] = exponents
    encoded.view(torch.int8)[:, 1:] = numbers.where(finite, NOT_FINITE)
    return encoded.view(-1)


def _add_int8(total: Tensor, encoded: Tensor, weight: int) -> None:
    blocks = encoded.view(-1, 1 + ALIGNMENT)
    units = _power(blocks[:, :1].int() - 6).to(total.dtype)
    numbers = blocks.view(torch.int8)[:, 1:].to(total.dtype)
    numbers.masked_fill_(numbers == NOT_FINITE, torch.nan)
    total.view(-1, ALIGNMENT).addcmul_(numbers, units, value=weight)


def _power(exponents: Tensor) -> Tensor:
    """Return 2 to the power of `exponents - 127`, made from the bits of a float32."""
    return (exponents << 23).view(torch.float32)


def _to_largest(values: Tensor, codec: Codec) -> Tensor:
    """Return the largest numbers, where NaN counts as the largest, followed by their indices."""
    places = values.abs().topk(codec.count(len(values)), sorted=False).indices
    return torch.cat([values[places].view(torch.uint8), places.int().view(torch.uint8)])


def _add_largest(total: Tensor, encoded: Tensor, weight: int) -> None:
    itemsize = total.element_size()
    count = len(encoded) // (itemsize + PLACE)
    # Copies, because a part of a longer buffer may begin at an address unaligned for the dtype.
    values = encoded[: count * itemsize].clone().view(total.dtype)
    places = encoded[count * itemsize :].clone().view(torch.int32)
    total[places.long()] += weight * values


ENCODERS = {"bfloat16": _to_bfloat16, "int8": _to_int8, "top-k": _to_largest}
ADDERS = {"bfloat16": _add_bfloat16, "int8": _add_int8, "top-k": _add_largest}
