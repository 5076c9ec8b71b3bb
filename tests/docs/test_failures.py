"""Each message says what is needed or what to do, or the page about failures explains it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "failures.md"
CODE = runpy.run_path(str(ROOT / "docs" / "messages.py"))
SOURCES, SCRIPTS = CODE["SOURCES"], CODE["SCRIPTS"]
messages, says_remedy = CODE["messages"], CODE["says_remedy"]


def unexplained(path: Path) -> list[str]:
    """Return the messages of a file that neither say a remedy nor stand on the page."""
    rows = CODE["explained"](PAGE.read_text())
    silent = [message for message in messages(path) if not says_remedy(message)]
    return [message for message in silent if not any(row in message for row in rows)]


@pytest.mark.gate
def test_a_message_has_a_remedy_or_a_row():
    """Oracle: the texts of raised errors, logged warnings, and prints to stderr."""
    messages_by_file = {str(path.relative_to(ROOT)): unexplained(path) for path in SOURCES}
    assert {file: texts for file, texts in messages_by_file.items() if texts} == {}


def test_messages_of_scripts_have_a_remedy_or_a_row():
    """Oracle: the quoted texts in lines that end a script."""
    assert sum(len(messages(path)) for path in SCRIPTS) > 3
    assert [message for path in SCRIPTS for message in unexplained(path)] == []


@pytest.mark.gate
def test_the_page_explains_nothing_that_is_not_said():
    """Oracle: all texts of the programs and scripts."""
    texts = [text for path in (*SOURCES, *SCRIPTS) for text in CODE["texts"](path)]
    rows = CODE["explained"](PAGE.read_text())
    assert len(rows) > 100
    assert [row for row in rows if not any(row in text for text in texts)] == []


@pytest.mark.parametrize(
    "line", ["steps=… must be at least 1", "it is a file; pass a directory", "x needs y, not z"]
)
def test_a_remedy_is_seen(line):
    """Oracle: by hand, messages with a need or an imperative."""
    assert says_remedy(line)


@pytest.mark.parametrize("line", ["the file ends before the image", "…; continuing from …"])
def test_a_missing_remedy_is_seen(line):
    """Oracle: by hand, messages that state a fact alone."""
    assert not says_remedy(line)


@pytest.mark.gate
def test_the_list_of_the_site_has_all_messages():
    """Oracle: a message of a program, of the library and of a script, and a link to the page."""
    lines = CODE["listing"](PAGE.read_text(), "failures.md").splitlines()
    assert "## mpikfac/checkpoint" in lines and "## jobs" in lines
    told = "the file ends before the image does"
    assert f"| `` {told} `` | [cause and remedy](failures.md) |" in lines
    assert "| `` ranks=… must be at least 1 `` |  |" in lines
