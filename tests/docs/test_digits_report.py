"""The report that the pages show: of the study in jobs/studies, complete, with three seeds."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpikfac_apps.study import spec

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "jobs" / "studies" / "digits.yaml"
PAGE = (ROOT / "docs" / "reports" / "digits.html").read_text()


def file(name: str) -> str:
    """Return the content of a file that the page holds."""
    (data,) = re.findall(rf'<a download="{re.escape(name)}" href="[^,"]*,([^"]*)"', PAGE)
    return base64.b64decode(data).decode()


@pytest.fixture
def cells(monkeypatch) -> list[spec.Cell]:
    """Return the cells of the study."""
    monkeypatch.chdir(ROOT)
    return list(spec.read(STUDY).cells)


def test_the_report_is_of_the_study(cells):
    """Oracle: the study's file, and the cells of the file."""
    (text,) = re.findall(r"<pre>(.*?)</pre>", PAGE, re.DOTALL)
    assert html.unescape(text).strip() == STUDY.read_text().strip()
    assert "by <code>mpikfac study jobs/studies/digits.yaml" in PAGE
    rows = json.loads(file("report.json"))["cells"]
    assert {row["cell"] for row in rows} == {cell.label for cell in cells}
    assert {row["state"] for row in rows} == {"complete"}
    assert [row["cell"] for row in csv.DictReader(io.StringIO(file("report.csv")))] == [
        row["cell"] for row in rows
    ]


def test_every_variant_of_the_report_has_an_interval_of_three_seeds():
    """Oracle: the rows of means, and the texts of the table."""
    means = json.loads(file("report.json"))["means"]
    assert {(row["seeds"], row["complete"]) for row in means} == {(3, 3)}
    assert all(row["test_accuracy"]["half"] is not None for row in means)
    table = PAGE.partition('id="means"')[2].partition('id="cells"')[0]
    assert table.count(">3 of 3</td>") == len(means)
    assert table.count("\N{PLUS-MINUS SIGN}") >= 2 * len(means)


def test_every_heading_of_the_report_has_content():
    """Oracle: the entries of the contents; an XML parser for the pictures."""
    headings = re.findall(r'<h2 id="([^"]+)">', PAGE)
    assert re.findall(r'<li><a href="#([^"]+)">', PAGE) == headings
    assert "No picture" not in PAGE and 'class="banner"' not in PAGE
    pictures = re.findall(r"<figure>.*?(<svg .*?</svg>)", PAGE, re.DOTALL)
    assert len([ElementTree.fromstring(picture) for picture in pictures]) >= 4
    parts = re.split(r"<h2 ", PAGE)[1:]
    assert all(re.search(r"<(table|svg|li)\b", part) for part in parts)
    assert not re.search(r"https?://|<link|\bsrc=|@import", PAGE)
