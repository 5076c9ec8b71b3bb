"""The tables on the page about the choice of a strategy are what `mpikfac simulate` prints.

python tests/docs/test_decision.py   # writes the tables anew
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpikfac
from mpikfac_apps.lab.predict import simulate

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "decision.md"
RANKS = ("8", "64", "512")
STRATEGIES = (
    *("sgd", "comm-opt", "mem-opt", "hybrid", "sharded-optimizer", "deferred-sharded", "spd-kfac"),
    "comm-opt-bf16",
)
COLUMNS = ["mean", "plain", "factors", "bases", "comm", "wait", "MiB", "sent"]


@functools.cache
def simulated(machine: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the printed cells by number of ranks, strategy and column."""
    asked = f"--machine {machine} --model resnet50 --ranks {','.join(RANKS)}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert simulate.main([*asked.split(), "--strategy", ",".join(STRATEGIES)]) == 0
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in printed.getvalue().splitlines():
        if heading := re.fullmatch(r"(\d+) ranks", line):
            found[heading[1]] = {}
        elif found and (words := line.split()) and words[0] in STRATEGIES:
            found[list(found)[-1]][words[0]] = dict(zip(COLUMNS, words[1:]))
    return found


def tables() -> str:
    """Return both tables."""
    return "\n".join([*times(), "", *sizes()]) + "\n"


def times() -> Iterator[str]:
    """Yield rows of mean milliseconds; the least time of K-FAC with float32 messages is bold."""
    yield f"| machine, ranks | {' | '.join(f'`{name}`' for name in STRATEGIES)} |"
    yield "|---" * (1 + len(STRATEGIES)) + "|"
    for machine in mpikfac.predict.published_machines():
        for ranks, rows in simulated(machine).items():
            cells = {name: rows[name]["mean"] for name in STRATEGIES}
            best = min((name for name in STRATEGIES[1:-1]), key=lambda name: float(cells[name]))
            cells[best] = f"**{cells[best]}**"
            yield f"| `{machine}`, {ranks} | {' | '.join(cells.values())} |"


def sizes() -> Iterator[str]:
    """Yield rows of mebibytes on the second machine, at 64 ranks."""
    yield "| 64 ranks | MiB stored by the fullest rank | MiB sent per rank and step, on average |"
    yield "|---|---|---|"
    for name, row in simulated("v100-edr")["64"].items():
        yield f"| `{name}` | {row['MiB']} | {row['sent']} |"


def test_the_tables_name_the_command():
    """Oracle: the ranks and strategies of the tables."""
    (command,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert f"--ranks {','.join(RANKS)} " in command and ",".join(STRATEGIES) in command


@pytest.mark.slow
def test_the_tables_are_what_the_command_prints():
    """Oracle: `mpikfac simulate` on the published machines."""
    assert tables() in PAGE.read_text()


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index("| machine, ranks |"), page.index("\n## What the table shows")
    PAGE.write_text(page[:begin] + tables() + page[end:])
