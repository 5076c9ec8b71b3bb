"""The site's search shows pages for users before the reference."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.gate
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def pages(monkeypatch):
    """Return the names of the site's program."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    monkeypatch.syspath_prepend(str(DOCS))
    return runpy.run_path(str(DOCS / "pages.py"))


def boost(pages, path):
    """Return the factor of a page in the search, and what the page hides."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})
    assert pages["on_page_markdown"]("text", page=page) == "text"
    return page.meta["search"]["boost"], page.meta.get("hide")


def test_the_search_shows_the_guide_first(pages):
    """Oracle: the order of the folders, by hand. The landing page has no navigation beside it."""
    order = ["docs/guide/tuning.md", "docs/ideas/plan.md", "SECURITY.md", "reference/mpikfac.md"]
    factors = [boost(pages, path)[0] for path in order]
    assert factors == sorted(factors, reverse=True) and len(set(factors)) == len(order)
    assert boost(pages, "README.md") == (factors[0], ["navigation"])
    assert boost(pages, "docs/decisions/index.md")[0] == factors[-1]


def test_the_factors_name_existing_places(pages):
    """Oracle: the folders and files; `reference/` exists in the site alone."""
    places = set(pages["BOOSTS"]) - {"reference/"}
    assert {place for place in places if not (DOCS.parent / place).exists()} == set()
