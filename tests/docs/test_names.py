"""The pages name existing files, and existing names of the library."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
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


def missing(missing_of: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a check of a page's text finds missing, by page."""
    by_page = {str(page.relative_to(ROOT)): missing_of(page.read_text()) for page in PAGES}
    return {page: names for page, names in by_page.items() if names}


def test_names_of_the_library_exist():
    """Oracle: the library."""

    def unknown(text: str) -> list[str]:
        names = set(re.findall(r"\bmpikfac(?:\.[A-Za-z_]\w*)+", text))
        return [n for n in names if n.split(".")[1] not in NO_NAMES and not exists(n)]

    assert missing(unknown) == {}


def test_names_in_docstrings_and_messages_exist():
    """Oracle: the library."""
    unknown = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "mpikfac").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"\bmpikfac(?:\.[A-Za-z_]\w*)+", node.value)
        if not exists(name)
    }
    assert unknown == set()


def test_files_of_the_code_exist():
    """Oracle: the files. A path starts at the repository, the library or the programs."""
    top = {path.name for place in PLACES for path in place.iterdir()}
    top -= {"examples"}  # folders of other projects; the own scripts are `apps/examples/`

    def unknown(text: str) -> list[str]:
        paths = set(re.findall(r"`((?:\w+/)+(?:\w+\.pyi?)?)`", text))
        named = {path for path in paths if path.split("/")[0] in top}
        return [p for p in named if not any((place / p).exists() for place in PLACES)]

    assert missing(unknown) == {}


def test_lists_begin_behind_an_empty_line():
    """Oracle: Markdown's rule; the site shows any other list as a paragraph with hyphens."""

    def joined(text: str) -> list[str]:
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        return re.findall(r"^(?![-*] |\d+\. |  |#).+\n(?:[-*]|\d+\.) .*", prose, re.MULTILINE)

    assert missing(joined) == {}


def test_the_tables_of_packages_name_all_packages():
    """Oracle: the folders."""
    section = ARCHITECTURE.read_text().partition("## Packages and layers")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \d+ \| ([^|]+) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    packages = {path.parent.name for path in (ROOT / "mpikfac").glob("*/__init__.py")}
    packages |= {path.parent.name for path in (ROOT / "apps/mpikfac_apps").glob("*/__init__.py")}
    assert {name.split("/")[0] for name in named if ".py" not in name} == packages
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
