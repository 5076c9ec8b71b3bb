"""The values that make up a strategy: the type of a value selects a method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from mpikfac.plan.choices.combinations import Combination

C = TypeVar("C", bound="Choice")


class Choice:
    """Base class for the types that represent methods, such as `CommOpt` or `BFloat16`.

    A concrete type is a frozen dataclass with its own `name`. Its fields are the settings of the
    method, so a setting exists only where it has a meaning. You can derive other types; their names
    are known as soon as their module is imported.

    Attributes:
        name: the method's name in programs and files, such as "comm-opt" or "bfloat16".
        needs: what the method and its fields require of other choices.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[Combination, ...]] = ()

    def __repr__(self) -> str:
        """Return the call that constructs the value, omitting fields with default values."""
        return differing(self)


def named_types(base: type[C]) -> dict[str, type[C]]:
    """Return the concrete types derived from `base`, and `base` if it is concrete, by name."""
    return {kind.name: kind for kind in _derived(base) if "name" in vars(kind)}


def _derived(base: type[C]) -> Iterator[type[C]]:
    yield base
    for kind in base.__subclasses__():
        yield from _derived(kind)


def differing(value: Any) -> str:
    """Return the call that constructs an instance of a dataclass, omitting default values."""
    given = ((f.name, getattr(value, f.name)) for f in fields(value) if not _is_default(value, f))
    return f"{type(value).__name__}({', '.join(f'{name}={each!r}' for name, each in given)})"


def _is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(value, field.name) == default)
