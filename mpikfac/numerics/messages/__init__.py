"""Numbers in messages: encoded in fewer bytes, and combined so that wrong ranks do little harm."""

from __future__ import annotations

from mpikfac.numerics.messages.codecs import add_decoded, encode, matrix_in, orthonormal, renewed
from mpikfac.numerics.messages.robust import BY_COORDINATE, BY_VECTOR, combined, near_most
from mpikfac.numerics.messages.shards import ByVector, Near, by_vector

__all__ = [
    "BY_COORDINATE",
    "BY_VECTOR",
    "ByVector",
    "Near",
    "add_decoded",
    "by_vector",
    "combined",
    "encode",
    "matrix_in",
    "near_most",
    "orthonormal",
    "renewed",
]
