"""The strategies on the page about exchanges are what the page says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import mpikfac
from mpikfac.plan import Aggregation, Synchronization, named_types

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "exchange.md"


def test_the_strategies_are_made():
    """Oracle: the steps between two exchanges, and the step of the first exchange, by hand."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made: dict[str, mpikfac.Strategy] = {}
    exec(program, made)
    dues = {
        name: [step for step in range(1100) if made[name].sync.due(step)][:2]
        for name in ("local_sgd", "post_local_sgd", "diloco", "local_kfac")
    }
    assert dues == {
        "local_sgd": [7, 15],
        "post_local_sgd": [1007, 1015],
        "diloco": [49, 99],
        "local_kfac": [7, 15],
    }
    assert made["local_kfac"].assignment == mpikfac.CommOpt()


def test_every_choice_of_an_exchange_is_on_the_page():
    """Oracle: the fields of the values."""
    page = PAGE.read_text() + (PAGE.parents[1] / "ideas" / "strategies.md").read_text()
    kinds = [*named_types(Synchronization).values(), *named_types(Aggregation).values()]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", page)] == []
