"""List the choices that need other choices, for the site."""

from __future__ import annotations

from collections.abc import Iterator

from mpikfac.plan import SPLIT, STRATEGY, Combination, shown
from mpikfac.settings import SETTINGS
from mpikfac.solvers import SOLVERS

HEADING = """# Choices that need other choices

`Strategy` and `KFAC` refuse a choice whose needs are not met, before any communication, in one
line: `sums='alltoall' needs fusion=None, not 2: an exchange of parts is one message`. The code
refuses by this table. `handed_on=True` are two split layers in a row. `of layer 'NAME'` behind a
solver or a rank means that a rule chose the solver or the rank.

| choice | needs | because |
|---|---|---|
"""


def listing() -> str:
    """Return the page of all combinations that the code refuses by."""
    needs = [need for solver in SOLVERS.values() for need in solver.form.needs]
    return HEADING + "".join(_rows([*STRATEGY, *SPLIT, *needs, *SETTINGS]))


def _rows(table: list[Combination]) -> Iterator[str]:
    """Yield a row for each combination, without repetition."""
    for cells in dict.fromkeys(map(_cells, table)):
        yield f"| {' | '.join(cells)} |\n"


def _cells(row: Combination) -> tuple[str, str, str]:
    """Return the choice, the needs and the reason."""
    values = "" if row.values is None else "=" + " or ".join(map(repr, row.values))
    needs = [f"`{shown(name, need)}`" for name, need in row.needs.items()]
    return f"`{row.choice}{values}`", (" or " if row.any_of else ", ").join(needs), row.why
