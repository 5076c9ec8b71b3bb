"""Published results: each entry agrees with its source, and a wrong figure fails."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mpikfac_apps.lab.reproduce import published, records
from mpikfac_apps.lab.reproduce.entry import Entry, Row
from mpikfac_apps.lab.reproduce.registry import ENTRIES
from mpikfac_apps.lab.reproduce.reproduce import main
from support.launch import environment

ROOT = Path(__file__).parents[2]
TRAINS = ("defaults", "exchange-rules")
MADE_UP = Entry(
    name="made-up",
    about="a number & its <source>",
    paper="SC20",
    source="table 1",
    found="predicted",
    tolerance=0.1,
    seconds=1,
    rows=list,
)


@pytest.fixture
def made_up(monkeypatch):
    """Return a function that replaces all entries by one with a given row."""

    def replaced(row: Row) -> None:
        entries = {"made-up": replace(MADE_UP, rows=lambda: [row])}
        monkeypatch.setattr("mpikfac_apps.lab.reproduce.reproduce.ENTRIES", entries)

    return replaced


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.gate) if name in TRAINS else name for name in ENTRIES],
)
def test_numbers_are_within_the_tolerance(name, monkeypatch, capsys):
    """Oracle: the published number of each row; known misses are still misses."""
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    code = main([name])
    text, error = capsys.readouterr()
    assert code == 0, text + error
    assert ENTRIES[name].command.split()[0] in text and ENTRIES[name].source.split()[0] in text


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [
        (Row("ms", "4 ranks", 100.0, 109.0), 0, "agrees"),
        (Row("ms", "4 ranks", 90.0, 109.0), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, 89.0), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, float("nan")), 1, "outside the tolerance"),
        (Row("ms", "4 ranks", 100.0, 50.0, "a reason"), 0, "miss: a reason"),
        (Row("ms", "4 ranks", 100.0, 99.0, "a reason"), 1, "but listed as a miss"),
    ],
)
def test_a_wrong_figure_is_an_error(row, code, told, made_up, capsys):
    """Oracle: by hand, with a tolerance of 10 %."""
    made_up(row)
    assert main(["made-up"]) == code
    assert told in capsys.readouterr().out


def test_a_planted_figure_of_a_paper_is_found(monkeypatch, capsys):
    """Oracle: an epoch of K-FAC-lw of 35 minutes in the place of 30, which is too far from 25."""
    monkeypatch.setitem(published.EPOCHS, 16, (15 * 60, 35 * 60))
    assert main(["sc20-steps"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "outside" in line]
    assert [line.split("  ")[1] for line in wrong] == ["ms of a step, K-FAC-lw, (1, 10)"]


def test_all_results_are_listed(capsys):
    """Oracle: the registry; the page lists the same names."""
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(ENTRIES)]] == list(ENTRIES)
    page = (ROOT / "docs" / "extensions" / "reproduce.md").read_text()
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == list(ENTRIES)


def test_an_unknown_result_is_refused(capsys):
    """Oracle: one line with the name that was meant."""
    assert main(["sc20-step"]) == 2
    assert capsys.readouterr().err == (
        "mpikfac reproduce: 'sc20-step' is unknown; did you mean sc20-steps?\n"
    )


def test_records_need_the_repository(monkeypatch, tmp_path, capsys):
    """Oracle: one line with the missing file and the remedy."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert main(["time-to-accuracy"]) == 2
    error = capsys.readouterr().err
    assert "time_to_accuracy.json is missing" in error and error.count("\n") == 1


class Text(HTMLParser):
    """Collect the texts of a page, and the elements that are open at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_appendix_has_commands_numbers_and_versions(made_up, tmp_path, capsys):
    """Oracle: the rows, in both formats; names and values of HTML are escaped."""
    made_up(Row("ms of a step", "4 ranks", 100.0, 50.0, "a reason"))
    assert main(["--appendix", str(tmp_path / "new")]) == 0
    markdown, html = (tmp_path / "new" / f"artifact.{kind}" for kind in ("md", "html"))
    assert str(html) in capsys.readouterr().out
    page = Text()
    page.feed(html.read_text())
    assert page.open == []
    for text in (markdown.read_text(), "".join(page.words)):
        assert "A number & its <source>." in text
        assert "command: mpikfac reproduce made-up" in text
        for fact in ("processor", "memory", "torch", "commit", "table 1", "10 %"):
            assert fact in text
    row = "| ms of a step | 4 ranks | 100 | 50 | -50 % | miss: a reason |"
    assert row in markdown.read_text().splitlines()
