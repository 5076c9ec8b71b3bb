"""The strategies on the page about exchanges are what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import mpikfac

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "exchange.md"


def test_the_strategies_are_made():
    """Oracle: the steps between two exchanges, and the step of the first exchange, by hand."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made: dict[str, mpikfac.Strategy] = {}
    exec(program, made)
    dues = {
        name: [step for step in range(1100) if made[name].exchange.due(step)][:2]
        for name in ("local_sgd", "post_local_sgd", "diloco", "local_kfac")
    }
    assert dues == {
        "local_sgd": [7, 15],
        "post_local_sgd": [1007, 1015],
        "diloco": [49, 99],
        "local_kfac": [7, 15],
    }
    assert made["local_kfac"].workers == 4


def test_every_choice_of_an_exchange_is_on_the_page():
    """Oracle: the fields of the values."""
    page = PAGE.read_text() + (PAGE.parents[1] / "ideas" / "strategies.md").read_text()
    names = mpikfac.Strategy.mem_opt().choices()
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", page)] == []
