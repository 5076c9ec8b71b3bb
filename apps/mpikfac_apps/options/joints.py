"""Options that choose a type: look up the types that a joint accepts, and the names of types.

A joint is a field whose type is derived from `Choice`, such as `sync: Synchronization`. A name
selects one of the known types; FILE.py:CLASS is a type defined by the user.
"""

from __future__ import annotations

import types
import typing
from difflib import get_close_matches
from typing import Any, TypeVar

from mpikfac.plan import Choice, named_types
from mpikfac_apps.text import is_own

C = TypeVar("C", bound=Choice)
OWN = "FILE.py:CLASS"

_spelled: dict[type, str] = {}
"""For each user-defined type, the text FILE.py:CLASS that named it."""


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself if it is not a union."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def base_of(hint: Any) -> type[Choice] | None:
    """Return the base class of a joint's types; None if a field of this type is not a joint."""
    members = [member for member in alternatives(hint) if member is not types.NoneType]
    if len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], Choice):
        return members[0]
    return None


def fields_of(options: type[Any]) -> set[str]:
    """Return the names of those fields of an options dataclass that are joints."""
    hints = typing.get_type_hints(options)
    return {name for name, hint in hints.items() if base_of(hint) is not None}


def allowed(base: type[Choice]) -> str:
    """Return a description of the types that a joint accepts."""
    return f"one of {', '.join([*named_types(base), OWN])}"


def type_of(joint: str, base: type[C], name: str) -> type[C]:
    """Return the type with the given name.

    Args:
        joint: the joint's name in messages, such as "sync".

    Raises:
        ValueError: no type has the name, or the file does not define such a type.
    """
    if is_own(name):
        return _own_type(joint, base, name)
    known = named_types(base)
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{joint}={name} must be {allowed(base)}{hint}")
    return known[name]


def _own_type(joint: str, base: type[C], name: str) -> type[C]:
    try:
        kind = own_type(name)
    except ValueError as error:
        raise ValueError(f"{joint}={name}: {error}") from error
    if not issubclass(kind, base):
        raise ValueError(f"{joint}={name} must be a class derived from {base.__name__}")
    return kind


def own_type(name: str) -> type:
    """Return the type that FILE.py:CLASS names, and remember the name.

    Raises:
        ValueError: the file does not exist, raises, or does not define the class.
    """
    from mpikfac_apps.problems.own import class_of  # imports torch

    kind = class_of(name)
    _spelled[kind] = name
    return kind


def spelling(kind: type) -> str | None:
    """Return the text FILE.py:CLASS that named a user-defined type; None for other types."""
    return _spelled.get(kind)


def name_of(value: Choice | None) -> str | None:
    """Return the name of a value's type, as a user wrote it."""
    if value is None:
        return None
    return spelling(type(value)) or getattr(value, "name", type(value).__name__)
