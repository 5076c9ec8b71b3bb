"""Numbers in fewer bytes: bounded errors, and error feedback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpikfac.lab import TopKCodec
from mpikfac.numerics import encode
from mpikfac.plan import BFloat16Codec, Int8Codec

BFLOAT16, INT8, TOP = BFloat16Codec(), Int8Codec(), TopKCodec(ratio=0.1)
CODECS = [BFLOAT16, INT8, TOP, TopKCodec(ratio=1.0)]
DTYPES = [torch.float32, torch.float64]


def draw(seed, blocks=12, dtype=torch.float32):
    """Return numbers whose size differs by orders of magnitude among blocks; and a block of 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks, 16, generator=generator, dtype=dtype)
    values *= 10.0 ** torch.randint(-20, 20, (blocks, 1), generator=generator)
    values[0] = 0
    return values.view(-1)


def decoded(values, codec, lost=None):
    found = torch.zeros_like(values)
    codec.add_decoded(found, encode(values, codec, lost), 1)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(st.integers(0, 99), st.integers(1, 12))
def test_encoded_numbers_take_the_bytes_that_are_planned(codec, dtype, seed, blocks):
    """Oracle: the formula of the plans, and by hand for 32 numbers."""
    values = draw(seed, blocks, dtype)
    encoded = encode(values, codec)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (codec.size(len(values), dtype.itemsize),)
    by_hand = [codec.size(32, 4) for codec in CODECS]
    assert by_hand == [64, 34, 4 * (4 + 4), 32 * (4 + 4)]


@given(st.integers(0, 999))
def test_rounding_is_bounded_by_half_a_unit(seed):
    """Oracle: 8 bits of a bfloat16's mantissa; 1/64 of the power of two below a block's largest."""
    values = draw(seed)
    assert ((decoded(values, BFLOAT16) - values).abs() <= values.abs() * 2**-8).all()
    largest = values.view(-1, 16).abs().amax(1, keepdim=True)
    unit = 2.0 ** largest.double().clamp(min=1e-30).log2().floor() / 64
    error = (decoded(values, INT8) - values).view(-1, 16).abs()
    clamped = (values.view(-1, 16).abs() / unit) > 127  # int8 has no 128
    assert (error <= torch.where(clamped, 1.0, 0.5) * unit).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_exact_stays_exact(dtype):
    """Oracle: small whole numbers times powers of two; all numbers where all travel."""
    whole = torch.arange(-64, 64, dtype=dtype) * 2.0**-30
    assert torch.equal(decoded(whole, INT8), whole)
    assert torch.equal(decoded(draw(3, dtype=dtype), CODECS[3]), draw(3, dtype=dtype))


@given(st.integers(0, 99))
def test_the_largest_numbers_travel(seed):
    """Oracle: sorted by size."""
    values = draw(seed)
    found = decoded(values, TOP)
    kept = values.abs().argsort(descending=True)[: TOP.count(len(values))]
    assert torch.equal(found[kept], values[kept])
    assert int((found != 0).sum()) <= len(kept)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_not_finite_arrives_alone_and_is_not_kept(codec, dtype, bad):
    """Oracle: all finite numbers, as well as an arena's padding: NaN in padding would stay."""
    values, lost = torch.linspace(1, 2, 64, dtype=dtype), torch.zeros(64, dtype=dtype)
    values[20], values[21] = bad, 0
    found = decoded(values, codec, lost)
    assert found.isfinite().logical_not().nonzero().tolist() == [[20]]
    assert found[21] == 0
    assert lost.isfinite().all()


def mean_error(codec, steps, feedback):
    """Return the largest error of the mean of received numbers."""
    values = draw(7, dtype=torch.float64) % 1  # of like size: no single number may dominate
    lost = torch.zeros_like(values) if feedback else None
    total = torch.zeros_like(values)
    for _ in range(steps):
        total += decoded(values, codec, lost)
    return float((total / steps - values).abs().max())


@pytest.mark.parametrize("codec, ratio", [(INT8, 1), (TOP, TOP.ratio)], ids=str)
def test_with_feedback_the_mean_over_steps_goes_to_what_is_sent(codec, ratio):
    """Oracle: lost parts stay bounded; the mean's error falls as 1 / steps.

    Without feedback the error is constant. With top-k a number waits at most until no number is
    larger: numbers below 1 wait at most 1 / ratio steps.
    """
    bound = 1 / ratio
    for steps in (100, 1000):
        assert mean_error(codec, steps, True) <= bound / steps
    assert mean_error(codec, 1000, True) < mean_error(codec, 100, True) / 5
    assert mean_error(codec, 1000, False) > 10 * mean_error(codec, 1000, True)
