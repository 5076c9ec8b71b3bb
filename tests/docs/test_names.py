"""The pages name existing files, and existing names of the library."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACES = [ROOT, *(ROOT / place for place in ("mpikfac", "apps", "apps/mpikfac_apps"))]
ARCHITECTURE = ROOT / "docs" / "ideas" / "architecture.md"
NO_NAMES = {"git", "py", "pyi"}  # mpikfac.py would be a file
CODE = "mpikfac", "apps", "jobs", "tests", "benchmarks", "packaging", ".github"
OUTSIDE = [ROOT / "packaging/README.md", ROOT / "tests/golden/README.md"]
ENDINGS = (".py", ".sh", ".sbatch", ".pbs", ".lsf", ".yaml", ".yml", ".cfg", ".toml", ".def", "")


def exists(name: str) -> bool:
    """Return whether a dotted name starts at `mpikfac` and can be reached."""
    try:
        found = importlib.import_module("mpikfac")
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_library_exist(page):
    """Oracle: the library."""
    names = set(re.findall(r"\bmpikfac(?:\.[A-Za-z_]\w*)+", page.read_text()))
    assert [name for name in names if not exists(name) and name.split(".")[1] not in NO_NAMES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_code_exist(page):
    """Oracle: the files. A path starts at the repository, the library or the programs."""
    paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.pyi?)?)`", page.read_text()))
    top = {path.name for place in PLACES for path in place.iterdir()}
    named = {path for path in paths if path.split("/")[0] in top}
    assert [p for p in named if not any((place / p).exists() for place in PLACES)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_begin_behind_an_empty_line(page):
    """Oracle: Markdown's rule; the site shows any other list as a paragraph with hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?![-*] |\d+\. |  |#).+\n(?:[-*]|\d+\.) .*", text, re.MULTILINE) == []


def test_the_tables_of_packages_name_all_packages():
    """Oracle: the folders."""
    section = ARCHITECTURE.read_text().partition("## Packages and layers")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \d+ \| ([^|]+) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    packages = {path.parent.name for path in (ROOT / "mpikfac").glob("*/__init__.py")}
    packages |= {path.parent.name for path in (ROOT / "apps/mpikfac_apps").glob("*/__init__.py")}
    assert {name for name in named if ".py" not in name} == packages
    files = {path.name for path in (ROOT / "mpikfac").glob("*.py")}
    files |= {path.name for path in (ROOT / "apps/mpikfac_apps").glob("*.py")}
    assert {name for name in named if name.endswith(".py")} == files - {
        "__init__.py",
        "__main__.py",
    }


def test_a_decision_has_a_page_and_a_line_in_the_index():
    """Oracle: the files of the folder."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text()
    pages = {path.name: path for path in folder.glob("*.md") if path.name != "index.md"}
    assert sorted(re.findall(r"^- \[.+\]\(([\w-]+\.md)\): .", index, re.MULTILINE)) == sorted(pages)


def test_pages_that_the_code_names_exist():
    """Oracle: the files; in programs, scripts, tests, configurations and settings of tools."""
    files = [path for name in CODE for path in (ROOT / name).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in (".cfg", ".toml", ".yml")]
    texts = [path.read_text() for path in files if path.suffix in ENDINGS]
    named = {
        page for text in texts for page in re.findall(r"(?<![\w/])docs/[\w/]+\.(?:md|py)\b", text)
    }
    assert len(named) > 10
    assert {page for page in named if not (ROOT / page).exists()} == set()


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.parent.name)
def test_links_of_pages_outside_the_site_lead_to_files(page):
    """Oracle: the files. The site's program checks all other links."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
