"""List the methods of `Strategy` and `KFAC`, and the choices that need others, for the site."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mpikfac.lab  # noqa: F401  its methods count too
from mpikfac.plan import (
    SHARDED,
    SPLIT,
    STRATEGY,
    Aggregation,
    Assignment,
    Choice,
    Clip,
    Combination,
    Compressor,
    Grafting,
    Refresh,
    Synchronization,
    named_types,
    shown,
)
from mpikfac.plan.choices.compression import NEEDS
from mpikfac.preconditioners import PRECONDITIONERS
from mpikfac.settings import SETTINGS

JOINTS: dict[str, type[Choice]] = {
    "assignment": Assignment,
    "sync": Synchronization,
    "sync.aggregation": Aggregation,
    "compression.gradients": Compressor,
    "refresh": Refresh,
    "grafting": Grafting,
    "clip": Clip,
}
"""The bases of methods by field of `Strategy`, or by argument of `KFAC`."""

HEADING = """# Choices that need other choices

`Strategy` and `KFAC` refuse a choice whose needs are not met. They do so before any communication
and in one line, such as `transport.owner_sums='alltoall' needs transport.fusion=None, not 2: the
parts are exchanged in one message`.

## Methods and their fields

A field exists only in the types of this table that list it, so most needs are a matter of the type
that you choose. Each type also checks the range of its own fields.

| field of `Strategy`, or argument of `KFAC` | type | name | fields and defaults |
|---|---|---|---|
"""
NEEDED = """
## Needs

The code refuses by this table. A dotted name such as `sync.local_steps` may be a property of a
method: it is true for all methods in which ranks take steps of their own. `handed_on=True` stands
for two split layers in a row. A refusal ends in `of layer 'NAME'` if a rule chose the
preconditioner or the rank.

| choice | needs | because |
|---|---|---|
"""


def listing() -> str:
    """Return the page of all methods, and of all combinations that the code refuses by."""
    of_methods = [need for _, kind in _methods() for need in kind.needs]
    of_preconditioners = [
        need for preconditioner in PRECONDITIONERS.values() for need in preconditioner.form.needs
    ]
    table = [*STRATEGY, *NEEDS, *of_methods, *SPLIT, *SHARDED, *of_preconditioners, *SETTINGS]
    return HEADING + "".join(_fields()) + NEEDED + "".join(_rows(table))


def _methods() -> Iterator[tuple[str, type[Choice]]]:
    """Yield each method with the field or the argument that takes it."""
    for field, base in JOINTS.items():
        for kind in named_types(base).values():
            yield field, kind


def _fields() -> Iterator[str]:
    """Yield a row for each method, with its fields and their defaults."""
    for field, kind in _methods():
        described = map(_field, dataclasses.fields(kind))
        cells = field, f"`{kind.__name__}`", f"`{kind.name}`", ", ".join(described)
        yield f"| {' | '.join(cells)} |\n"


def _field(field: dataclasses.Field[Any]) -> str:
    """Return a field's name, with its default if it has one."""
    default = "" if field.default is dataclasses.MISSING else f"={field.default!r}"
    return f"`{field.name}{default}`"


def _rows(table: list[Combination]) -> Iterator[str]:
    """Yield a row for each combination, without repetition."""
    for cells in dict.fromkeys(map(_cells, table)):
        yield f"| {' | '.join(cells)} |\n"


def _cells(row: Combination) -> tuple[str, str, str]:
    """Return the choice, the needs and the reason."""
    values = "" if row.values is None else "=" + " or ".join(map(repr, row.values))
    needs = [f"`{shown(name, need)}`" for name, need in row.needs.items()]
    return f"`{row.choice}{values}`", (" or " if row.any_of else ", ").join(needs), row.why
