"""Build strategies from tables that map dotted names, such as "transport.overlap", to values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mpikfac import CommOpt, HybridOpt, MemOpt, Strategy

Value = TypeVar("Value")


def strategy_of(*tables: Mapping[str, Any]) -> Strategy:
    """Return a strategy from dotted names; the assignment is MEM-OPT unless a table sets it."""
    return changed(Strategy(MemOpt()), *tables)


def changed(value: Value, *tables: Mapping[str, Any]) -> Value:
    """Return a copy of a frozen dataclass with new values by dotted name; later tables win.

    The value of a whole part, such as "sync", is set before values inside it.
    """
    parts: dict[str, dict[str, Any]] = {}
    for table in tables:
        for name, inner in table.items():
            head, _, rest = name.partition(".")
            parts.setdefault(head, {})[rest] = inner
    new = {head: _part(value, head, inside) for head, inside in parts.items()}
    return replace(value, **new)  # type: ignore[type-var]


def _part(value: Any, head: str, inside: Mapping[str, Any]) -> Any:
    """Return the new value of a field; the name "" means the whole field."""
    part = inside[""] if "" in inside else getattr(value, head)
    deeper = {name: inner for name, inner in inside.items() if name}
    return changed(part, deeper) if deeper else part


def assigned(workers: int, ranks: int, **fields: Any) -> CommOpt | MemOpt | HybridOpt:
    """Return the assignment with `workers` gradient workers for each layer."""
    if workers == ranks:
        return CommOpt(**fields)
    return MemOpt(**fields) if workers == 1 else HybridOpt(grad_workers=workers, **fields)
