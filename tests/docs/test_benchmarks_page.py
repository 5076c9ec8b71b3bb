"""The pages of measurements are short, complete, and name programs and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PAGE = FOLDER / "README.md"
TOPICS = sorted((FOLDER / "results").glob("*.md"))
COLUMNS = ["claim", "number", "seeds", "command", "date", "commit", "file"]
HELPERS = {
    *("training.py", "checkouts.py", "paired.py", "trace_cost.py", "timing.py", "gpu_parts.py"),
    "start.py",
}
"""Parts of other programs, tools without a result of their own, and a result of the traces."""


def claims() -> list[dict[str, str]]:
    """Return the rows of the table, by column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == COLUMNS
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]


def test_each_topic_has_a_claim_and_each_claim_a_topic():
    """Oracle: the files of the folder."""
    files = {re.search(r"\(results/(\w+\.md)", claim["file"])[1] for claim in claims()}
    assert files == {path.name for path in TOPICS}


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim["claim"])
def test_a_claim_names_its_program_date_and_commit(claim):
    """Oracle: the topic, which has the program's name, the number and the date or a later date."""
    topic = (FOLDER / re.search(r"\((results/\w+\.md)", claim["file"])[1]).read_text()
    program = claim["command"].strip("`").removeprefix("mpikfac ").split()[0]
    assert program in topic, program
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim["date"])
    assert re.fullmatch(r"[0-9a-f]{7}", claim["commit"])
    for number in re.findall(r"[\d,.]*\d", claim["number"]):
        assert number in topic, number


def test_each_program_has_a_result():
    """Oracle: the programs of the folder."""
    text = "".join(path.read_text() for path in TOPICS)
    programs = {path.name for end in ("*.py", "*.sh") for path in FOLDER.glob(end)}
    assert {name for name in programs - HELPERS if f"benchmarks/{name}" not in text} == set()
    named = set(re.findall(r"benchmarks/(\w+\.(?:py|sh))", text))
    assert named <= programs


def test_each_raw_result_is_named_by_a_topic():
    """Oracle: the files of the folder."""
    text = "".join(path.read_text() for path in TOPICS)
    raw = {path.name for path in (FOLDER / "results").iterdir()} - {path.name for path in TOPICS}
    families = {re.sub(r"^curvature_\w+", "curvature_NETWORK", name) for name in raw}
    assert {name for name in families if name not in text} == set()
