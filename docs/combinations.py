"""List, for the site, the methods that `Strategy` and `KFAC` accept and what each choice needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mpikfac.lab  # noqa: F401  its methods are listed, too
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
"""The base class of the methods for each field of `Strategy` or argument of `KFAC`."""

HEADING = """# Choices that need other choices

`Strategy` and `KFAC` reject a choice if it needs another choice that was not made. They do so
before any communication, with a one-line error such as `transport.owner_sums='alltoall' needs
transport.fusion=None, not 2: the parts are exchanged in one message`.

## Methods and their fields

Each type accepts only the fields listed for it in this table, and checks their ranges.

| field of `Strategy`, or argument of `KFAC` | type | name | fields and defaults |
|---|---|---|---|
"""
NEEDED = """
## Needs

The code enforces the requirements in this table. A dotted name can also be a property of a method:
for example, `sync.local_steps` is True for all methods in which ranks step independently.
`handed_on=True` means that there are two split layers in a row. An error message ends in
`of layer 'NAME'` if a rule chose the preconditioner or the rank for this layer.

| choice | needs | because |
|---|---|---|
"""


def listing() -> str:
    """Return the page that lists all methods, and all combinations that the code checks."""
    of_methods = [need for _, kind in _methods() for need in kind.needs]
    of_preconditioners = [
        need for preconditioner in PRECONDITIONERS.values() for need in preconditioner.form.needs
    ]
    table = [*STRATEGY, *NEEDS, *of_methods, *SPLIT, *SHARDED, *of_preconditioners, *SETTINGS]
    return HEADING + "".join(_fields()) + NEEDED + "".join(_rows(table))


def _methods() -> Iterator[tuple[str, type[Choice]]]:
    """Yield each method with the field or argument that accepts it."""
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
    """Yield a row for each combination, without duplicates."""
    for cells in dict.fromkeys(map(_cells, table)):
        yield f"| {' | '.join(cells)} |\n"


def _cells(row: Combination) -> tuple[str, str, str]:
    """Return the choice, what it needs, and the reason."""
    values = "" if row.values is None else "=" + " or ".join(map(repr, row.values))
    needs = [f"`{shown(name, need)}`" for name, need in row.needs.items()]
    return f"`{row.choice}{values}`", (" or " if row.any_of else ", ").join(needs), row.why
