"""Pickle options for other ranks; a user-defined type is stored as the text FILE.py:CLASS.

By itself, pickle stores a class under the name of its module, which only a rank that has executed
the file can find.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from mpikfac_apps.options import joints


def dumps(options: Any) -> bytes:
    """Return options as bytes."""
    content = io.BytesIO()
    _Pickler(content).dump(options)
    return content.getvalue()


def loads(content: bytes) -> Any:
    """Return options from bytes that a rank has pickled; execute the files that define types.

    Raises:
        ValueError: a file does not exist, raises, or does not define the class.
    """
    return _Unpickler(io.BytesIO(content)).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return joints.spelling(value) if isinstance(value, type) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> type:
        return joints.own_type(name)
