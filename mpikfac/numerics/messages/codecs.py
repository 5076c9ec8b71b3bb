"""Encode values with error feedback.

The encoding error is stored as a residual, and added to the next values before they are encoded
[Seide et al. 2014]. Sums over time therefore lose only the residual of the last step.
"""

from __future__ import annotations

from torch import Tensor

from mpikfac.plan import Codec


def encode(
    values: Tensor, codec: Codec, residual: Tensor | None = None, velocity: Tensor | None = None
) -> Tensor:
    """Return `values` `[n]` as bytes, `[codec.size(n)]`.

    Args:
        residual: the residual `[n]` of the last encoding: it is added to `values`, then replaced by
            the new one. Non-finite values are sent, but not stored in the residual.
        velocity: the momentum `[n]` of delayed values, which is updated; None unless the codec
            delays values.
    """
    if residual is None:
        return _encode(values, codec)
    if velocity is not None:
        values = codec.accumulate(velocity, values)
    residual += values
    encoded = _encode(residual, codec)
    codec.add_decoded(residual, encoded, -1)
    residual.nan_to_num_(0.0, 0.0, 0.0)
    if velocity is not None:
        codec.clear_sent(velocity, encoded)
        velocity.nan_to_num_(0.0, 0.0, 0.0)
    return encoded


def _encode(values: Tensor, codec: Codec) -> Tensor:
    encoded: Tensor = codec.encode(values)
    return encoded
