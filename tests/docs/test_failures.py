"""The page about failures explains every message, and only existing messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "failures.md"
SOURCES = sorted([*(ROOT / "mpikfac").rglob("*.py"), *(ROOT / "apps").rglob("*.py")])
SCRIPTS = sorted(path for path in (ROOT / "jobs").rglob("*.*") if path.suffix != ".yaml")
ERRORS = {"ArgumentTypeError", "OSError", "RuntimeError", "TypeError", "UserError", "ValueError"}
SAYS = {"error", "print", "warning"}  # of a parser, to stderr, of a log


def template(node: ast.AST | None) -> str:
    """Return a text with … in place of variable parts."""
    if isinstance(node, ast.Constant):
        return re.sub(r"(%[a-z])+", "…", str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    return "…"


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def said(tree: ast.AST) -> Iterator[str]:
    """Return the texts of errors and warnings, without texts assembled elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, wanted = node.exc, ERRORS
        elif isinstance(node, ast.Call):
            call, wanted = node, SAYS
        else:
            continue
        to_screen = called(call) == "print" and "file" not in {word.arg for word in call.keywords}
        if called(call) in wanted and call.args and not to_screen:
            yield template(call.args[0])


def texts(tree: ast.AST) -> Iterator[str]:
    """Return all texts of a program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield template(node)


def shell_texts(script: str) -> Iterator[str]:
    """Return the quoted texts of a script."""
    for quoted in re.findall(r'"([^"\n]*)"', script):
        yield re.sub(r"\$\w+|\$\{[^}]*\}", "…", quoted)


def explained() -> list[str]:
    """Return the page's messages: all code in the first cells of the page's tables."""
    cells = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(), re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def tells(text: str) -> bool:
    """Return whether a text has own words, besides a name before another message."""
    return re.search(r"[a-z]", text.replace("mpikfac", "").split(": ")[-1]) is not None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_message_is_explained(path):
    """Oracle: the texts of raised errors, logged warnings, and prints to stderr."""
    page = explained()
    messages = [text for text in said(ast.parse(path.read_text())) if tells(text)]
    assert [text for text in messages if not any(known in text for known in page)] == []


def test_scripts_messages_are_explained():
    """Oracle: the quoted texts in lines that end a script."""
    page = explained()
    lines = [line for path in SCRIPTS for line in path.read_text().splitlines()]
    ends = [line for line in lines if re.search(r"\bdie |>&2", line)]
    spoken = [re.split(r"\b(?:die|echo) ", line)[-1] for line in ends]
    messages = [text for line in spoken for text in shell_texts(line) if tells(text)]
    assert len(messages) > 3
    assert [text for text in messages if not any(known in text for known in page)] == []


def test_the_page_explains_nothing_that_is_not_said():
    """Oracle: all texts of the programs and scripts."""
    found = [text for path in SOURCES for text in texts(ast.parse(path.read_text()))]
    found += [text for path in SCRIPTS for text in shell_texts(path.read_text())]
    page = explained()
    assert len(page) > 100
    assert [known for known in page if not any(known in text for text in found)] == []
