"""The path of a step, which a reader has to follow, does not grow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launch import launch

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "calls.py")


@pytest.mark.parametrize(
    ("kind", "owner", "others"),
    [
        pytest.param("linear", (90, 48), (57, 28), marks=pytest.mark.slow),
        pytest.param("conv", (103, 63), (70, 43), marks=pytest.mark.gate),
    ],
)
def test_a_further_layer_takes_few_calls(kind, owner, others):
    """Oracle: a budget of calls and changes of file; benchmarks/results/core.md has the table."""
    ended = launch(4, SCRIPT, kind, "inverse")
    assert ended.returncode == 0, ended.stderr
    found = [
        tuple(map(int, re.findall(r"(\d+) (?:calls|changes)", line)))
        for line in ended.stdout.splitlines()
    ]
    assert len(found) == 3
    for spent, budget in zip(found[1:], (owner, others)):
        assert all(some <= allowed for some, allowed in zip(spent, budget)), ended.stdout
