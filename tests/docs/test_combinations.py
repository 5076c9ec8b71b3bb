"""The page of combinations says what the code refuses.

python tests/docs/test_combinations.py   # writes the page anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpikfac.plan import SPLIT, STRATEGY, Combination, shown
from mpikfac.settings import SETTINGS
from mpikfac.solvers import SOLVERS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "combinations.md"
HEADING = """# Choices that need other choices

`Strategy` and `KFAC` refuse a choice whose needs are not met, before any communication, in one
line: `sums='alltoall' needs fusion=None, not 2: an exchange of parts is one message`.
Code refuses by the table below; a test keeps this page equal to the table.
`ways` and `handed_on` belong to [split layers](../extensions/split_layers.md):
`handed_on=True` are two split layers in a row.
`of layer 'NAME'` behind a solver or a rank means that a rule chose the solver or the rank.

| choice | needs | because |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    solvers = [need for solver in SOLVERS.values() for need in solver.form.needs]
    return HEADING + "".join(rows([*STRATEGY, *SPLIT, *solvers, *SETTINGS]))


def rows(table: list[Combination]) -> Iterator[str]:
    """Yield a row for each combination, without repetition."""
    for row in dict.fromkeys(map(cells, table)):
        yield f"| {' | '.join(row)} |\n"


def cells(row: Combination) -> tuple[str, str, str]:
    """Return the choice, the needs and the reason."""
    values = "" if row.values is None else "=" + " or ".join(map(repr, row.values))
    needs = [f"`{shown(name, need)}`" for name, need in row.needs.items()]
    return f"`{row.choice}{values}`", (" or " if row.any_of else ", ").join(needs), row.why


def test_the_page_is_the_table():
    """Oracle: the rows of the refusals in the code."""
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
