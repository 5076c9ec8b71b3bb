"""Collect the messages in the code: errors, warnings, and lines printed to stderr.

The site lists all messages by package. `docs/reference/failures.md` explains the messages that do
not say what to do, and a test compares this page with the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "mpikfac").rglob("*.py"), *(ROOT / "apps").rglob("*.py")])
SCRIPTS = sorted(path for path in (ROOT / "jobs").rglob("*.*") if path.suffix != ".yaml")
ERRORS = {"ArgumentTypeError", "OSError", "RuntimeError", "TypeError", "UserError", "ValueError"}
CALLS = {"error", "print", "warning"}  # a parser's, Python's with stderr, a logger's
VERBS = (
    "add|allow|average|begin|call|change|check|choose|clip|close|construct|continue|convert|copy|create|delete|"
    "detach|end|fix|freeze|give|install|leave|load|make|measure|name|pass|put|raise|remove|rename|repair|restart|"
    "run|see|select|set|split|start|store|take|train|try|unpack|unset|use|write"
)
BEFORE = "with curvature servers, |and |or |for a single output, "
NEED = re.compile(
    r"^(pass|set|use|write) "
    r"|\b(must|needs?|needed|takes?|accepts?|one of|known (?:keys )?are|did you mean|choices are)\b"
    r"|\b(go on|continue) with\b"
    rf"|[;:,.] (?:{BEFORE})*({VERBS})\b"
)
"""Matches a message that says what is needed or what to do."""
HEADING = """# Messages

This page lists all errors and warnings of the library, the programs and the job scripts by package.
`…` stands for text that varies. Messages without a link already state what is needed or what to do.
"""


def template(node: ast.AST | None) -> str:
    """Return a text with its variable parts replaced by …."""
    if isinstance(node, ast.Constant):
        return re.sub(r"(%[a-z])+", "…", str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    return "…"


def texts(path: Path) -> list[str]:
    """Return all texts in a program or script, with their variable parts replaced by …."""
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(path.read_text()))
        return [template(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
    return list(_quoted(path.read_text()))


def messages(path: Path) -> list[str]:
    """Return the messages in a program or script, excluding those assembled elsewhere."""
    if path.suffix == ".py":
        candidates = _said(ast.parse(path.read_text()))
    else:
        lines = re.findall(r"^.*(?:\bdie |>&2).*$", path.read_text(), re.MULTILINE)
        ends = (re.split(r"\b(?:die|echo) ", line)[-1] for line in lines)
        candidates = (text for end in ends for text in _quoted(end))
    return [text for text in candidates if _has_words(text)]


def explained(page: str) -> list[str]:
    """Return the messages that a page explains: all code in the first column of its tables."""
    cells = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def says_remedy(message: str) -> bool:
    """Return whether a message says what is needed or what to do."""
    return NEED.search(message) is not None


def listing(page: str, link: str) -> str:
    """Return the page of all messages.

    Args:
        page: the text of the page that explains messages.
        link: the link to this page.
    """
    rows = explained(page)
    rooms: dict[str, set[str]] = {}
    for path in (*SOURCES, *SCRIPTS):
        room = str(path.relative_to(ROOT).parent)
        rooms.setdefault(room, set()).update(messages(path))
    lines = [HEADING]
    for room, room_messages in sorted(rooms.items()):
        if room_messages:
            lines += [f"\n## {room}\n\n| message | |\n|---|---|\n"]
        for message in sorted(room_messages):
            reference = f"[cause and remedy]({link})" if any(row in message for row in rows) else ""
            code = message.replace("\n", " ").replace("|", "\\|")
            lines += [f"| `` {code} `` | {reference} |\n"]
    return "".join(lines)


def _said(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of errors and warnings, and those printed to stderr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, names = node.exc, ERRORS
        elif isinstance(node, ast.Call):
            call, names = node, CALLS
        else:
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        to_screen = name == "print" and "file" not in {word.arg for word in call.keywords}
        if name in names and call.args and not to_screen:
            yield template(call.args[0])


def _quoted(script: str) -> Iterator[str]:
    """Yield the quoted texts in a script."""
    for quoted in re.findall(r'"([^"\n]*)"', script):
        yield re.sub(r"\$\w+|\$\{[^}]*\}", "…", quoted)


def _has_words(text: str) -> bool:
    """Return whether a text contains words, and not just a prefix for another message."""
    return re.search(r"[a-z]", text.replace("mpikfac", "").split(": ")[-1]) is not None
