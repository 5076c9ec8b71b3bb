"""The page of predictions beside measurements is what its script prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extensions" / "scoreboard.md"


@pytest.fixture
def scoreboard(monkeypatch):
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scoreboard

    return scoreboard


@pytest.mark.gate
def test_the_page_is_what_the_script_prints(scoreboard):
    """Oracle: the script, which predicts anew."""
    assert PAGE.read_text() == "\n".join(scoreboard.page()) + "\n"


def test_messages_of_steps_have_a_section_if_they_were_simulated(scoreboard, monkeypatch, tmp_path):
    """Oracle: a row by hand; no section without the file."""
    monkeypatch.setattr(scoreboard, "RESULTS", tmp_path)
    assert list(scoreboard.steps()) == []
    rows = [("sgd", 11), ("comm-opt", 7)]
    rows = [
        {"machine": "a", "ranks": 64, "strategy": name, "predicted_ms": ms, "simulated_ms": 10}
        for name, ms in rows
    ]
    (tmp_path / "smpi.json").write_text(json.dumps(rows))
    assert "| 64 of a | 2 | 20 % | comm-opt: -30 % |" in list(scoreboard.steps())
