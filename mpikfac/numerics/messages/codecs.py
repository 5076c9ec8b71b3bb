"""Encode values in fewer bytes, and decode: bfloat16, blocks of 8 bits, only the largest values.

Error feedback [Seide et al. 2014]: the encoding error is stored as a residual, and added to the
next values before they are encoded. Sums over time therefore lose only the residual of the last
step.

Matrices are not reduced element by element. PowerSGD [Vogels et al. 2019] reduces `P = M Q`, makes
the columns of P orthonormal, reduces `Q = M^T P`, and uses `P Q^T` as the sum of all M. This is one
step of a power iteration, which starts from the Q of the last step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpikfac.plan import ALIGNMENT, PLACE, Codec, CustomCodec, Matrix

NOT_FINITE = -128  # among 8-bit integers; all others are from -127 to 127


def encode(
    values: Tensor, codec: Codec, residual: Tensor | None = None, velocity: Tensor | None = None
) -> Tensor:
    """Return `values` `[n]` as bytes, `[codec.size(n)]`.

    Args:
        residual: the residual `[n]` of the last encoding: it is added to `values`, then replaced by
            the new one. Non-finite values are sent, but not stored in the residual.
        velocity: `[n]`, only with "top-k": `momentum * velocity + values` replaces `values`,
            and becomes 0 where values are sent [DGC, Lin et al. 2018].
    """
    if residual is None:
        return _encode(values, codec)
    if velocity is not None:
        values = velocity.mul_(codec.momentum).add_(values)
    residual += values
    encoded = _encode(residual, codec)
    add_decoded(residual, encoded, codec, -1)
    residual.nan_to_num_(0.0, 0.0, 0.0)
    if velocity is not None:
        velocity[places_of(encoded, values.element_size())] = 0
        velocity.nan_to_num_(0.0, 0.0, 0.0)
    return encoded


def add_decoded(total: Tensor, encoded: Tensor, codec: Codec, weight: int = 1) -> None:
    """Add the decoded values, times `weight`, to `total` `[n]`."""
    if isinstance(codec, CustomCodec):
        codec.add_decoded(total, encoded, weight)
    else:
        ADDERS[codec.name](total, encoded, weight)


def _encode(values: Tensor, codec: Codec) -> Tensor:
    if not isinstance(codec, CustomCodec):
        return ENCODERS[codec.name](values, codec)
    encoded: Tensor = codec.encode(values)
    return encoded


def _to_bfloat16(values: Tensor, _: Codec) -> Tensor:
    return values.to(torch.bfloat16).view(torch.uint8)


def _add_bfloat16(total: Tensor, encoded: Tensor, weight: int) -> None:
    total.add_(encoded.view(torch.bfloat16), alpha=weight)


def _to_int8(values: Tensor, _: Codec) -> Tensor:
    """Return blocks of an exponent and 8-bit values.

    The exponent is that of the largest value of the block; values are in units of 1/64 of 2 to the
    exponent. The format is OCP's MXINT8 with shorter blocks: no block spans two layers, because the
    values of different layers can differ by orders of magnitude. Values that are not finite in
    float32 become NaN.
    """
    blocks = values.float().view(-1, ALIGNMENT)
    finite = blocks.isfinite()
    blocks = blocks.where(finite, 0)
    largest = blocks.abs().amax(1, keepdim=True)
    exponents = (largest.view(torch.int32) >> 23).clamp_(min=7)  # so that units are not subnormal
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
    """Return 2 to the power of `exponents - 127`, from the bits of a float32."""
    return (exponents << 23).view(torch.float32)


def _to_largest(values: Tensor, codec: Codec) -> Tensor:
    """Return the largest values, where NaN counts as the largest, followed by their indices."""
    places = values.abs().topk(codec.count(len(values)), sorted=False).indices
    return torch.cat([values[places].view(torch.uint8), places.int().view(torch.uint8)])


def _add_largest(total: Tensor, encoded: Tensor, weight: int) -> None:
    places = places_of(encoded, total.element_size())
    # A copy, because a part of a longer buffer can start at an address unaligned for the dtype.
    values = encoded[: len(places) * total.element_size()].clone().view(total.dtype)
    total[places] += weight * values


def places_of(encoded: Tensor, itemsize: int) -> Tensor:
    """Return the indices of the values that "top-k" sends."""
    count = len(encoded) // (itemsize + PLACE)
    return encoded[count * itemsize :].clone().view(torch.int32).long()


ENCODERS = {"bfloat16": _to_bfloat16, "int8": _to_int8, "top-k": _to_largest}
ADDERS = {"bfloat16": _add_bfloat16, "int8": _add_int8, "top-k": _add_largest}


def matrix_in(flat: Tensor, place: Matrix) -> Tensor:
    """Return a view of a gradient in an arena, `[groups, outputs, inputs]`."""
    shape = place.groups, place.outputs, place.inputs
    return flat[place.start : place.start + math.prod(shape)].view(shape)


def orthonormal(columns: Tensor) -> Tensor:
    """Return a basis `[groups, n, rank]` of the columns; NaN for columns that are not finite."""
    finite = columns.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.linalg.qr(columns.where(finite, 0)).Q.where(finite, torch.nan)


def renewed(right: Tensor, seed: int) -> Tensor:
    """Return Q `[groups, inputs, rank]`, with unusable columns replaced by normal random ones.

    A column of zeros would stay zero, and one that is not finite would corrupt all later sums.
    """
    sizes = right.abs().sum(-2, keepdim=True)
    usable = sizes.isfinite() & (sizes > 0)
    if usable.all():
        return right
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(right.shape, generator=generator, dtype=torch.float64, device="cpu")
    return right.where(usable, drawn.to(right))
