"""Numbers in messages: encoded in fewer bytes, and combined so that wrong ranks do little harm."""

from __future__ import annotations

from mpikfac.numerics.messages.codecs import add_decoded, encode, matrix_in, orthonormal, renewed
from mpikfac.numerics.messages.robust import BY_COORDINATE, BY_VECTOR, combined

__all__ = [
    "BY_COORDINATE",
    "BY_VECTOR",
    "add_decoded",
    "combined",
    "encode",
    "matrix_in",
    "orthonormal",
    "renewed",
]
