"""Choose the site's pages, and generate the pages of the API reference.

A page has the same path as its file in the repository, so links work in both places. The README is
the landing page. The reference has a page for the exported names of `mpikfac`, a page for each
package in `mpikfac`, and lists of messages and combinations. Search results from the guide rank
above those from the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import combinations
import messages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import mpikfac

ROOT = Path(__file__).parent.parent
SHOWN = (
    *("*.md", "docs/*/*.md", "docs/*.css", "docs/pictures/*"),
    *("docs/reports/*.html", "benchmarks/*.md", "benchmarks/results/*", "mpikfac/**/*.py"),
)
MODULES = ("mpikfac.settings.schedule", "mpikfac.timeline")  # modules that mpikfac exports
BOOSTS = {  # search boosts by path prefix; 1 for all other paths
    **dict.fromkeys(("README.md", "docs/start/", "docs/guide/"), 4),
    **dict.fromkeys(("docs/ideas/", "docs/extensions/"), 2),
    **dict.fromkeys(("docs/decisions/", "reference/", "CHANGELOG.md", "CONTRIBUTING.md"), 0.5),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Return the configuration with folders in the navigation replaced by their pages."""
    config.nav = [_opened(entry) for entry in config.nav or ()]
    return config


def _opened(entry: Any) -> Any:
    """Return a navigation entry with folders replaced by lists of their pages."""
    if isinstance(entry, dict):
        return {title: _opened(value) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_opened(value) for value in entry]
    if not entry.endswith("/"):
        return entry
    pages = sorted((ROOT / entry).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return [str(page.relative_to(ROOT)) for page in pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, the repository's files to show, and the reference."""
    shown = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in (path for pattern in SHOWN for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        file = File.generated(config, name, abs_src_path=str(path))
        if path.suffix == ".py":
            file.dest_uri = f"{name}.txt"  # browsers show text files, but download programs
        shown.append(file)
    packages = [f"mpikfac.{path.parent.name}" for path in (ROOT / "mpikfac").glob("*/__init__.py")]
    for name in ("mpikfac", *packages, *MODULES):
        page = f"# {name}\n\n::: {name}\n"
        if name == "mpikfac":
            page += f"    options: {{inherited_members: true, members: {mpikfac.__all__}}}\n"
        shown.append(File.generated(config, f"reference/{name}.md", content=page))
    lists = {"messages": _messages(), "combinations": combinations.listing()}
    for name, page in lists.items():
        shown.append(File.generated(config, f"reference/{name}.md", content=page))
    return shown


def _messages() -> str:
    """Return the page of all messages, with links to the page that explains some of them."""
    page = "docs/reference/failures.md"
    return messages.listing((ROOT / page).read_text(), f"../{page}")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page's text unchanged; set its search boost, and hide the README's navigation."""
    path = page.file.src_uri
    boost = next((boost for start, boost in BOOSTS.items() if path.startswith(start)), 1)
    page.meta["search"] = {"boost": boost}
    if path == "README.md":
        page.meta["hide"] = ["navigation"]
    return markdown
