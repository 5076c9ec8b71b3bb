"""Choose the pages of the site, and make the pages of the API reference.

A page has the path of the file in the repository, so links between files work in both places. The
reference has a page for the exported names of `mpikfac`, and a page for each package in `mpikfac`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import mpikfac

ROOT = Path(__file__).parent.parent
SHOWN = (
    *("*.md", "docs/*.md", "docs/decisions/*.md", "docs/*.css", "docs/pictures/*.svg"),
    *("docs/reports/*.html", "benchmarks/*.md", "benchmarks/results/*", "mpikfac/**/*.py"),
)
MODULES = ("mpikfac.settings.schedule", "mpikfac.timeline")  # modules that mpikfac exports


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Return the configuration with the pages of a folder in the place of the folder."""
    config.nav = [_opened(entry) for entry in config.nav or ()]
    return config


def _opened(entry: Any) -> Any:
    """Return an entry of the navigation, with lists of pages in the place of folders."""
    if isinstance(entry, dict):
        return {title: _opened(value) for title, value in entry.items()}
    if isinstance(entry, list):
        return [_opened(value) for value in entry]
    if not entry.endswith("/"):
        return entry
    pages = sorted((ROOT / entry).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return [str(page.relative_to(ROOT)) for page in pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, the shown files of the repository, and the reference."""
    shown = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in (path for pattern in SHOWN for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        file = File.generated(config, name, abs_src_path=str(path))
        if path.suffix == ".py":
            file.dest_uri = f"{name}.txt"  # a browser shows text, but stores programs
        shown.append(file)
    packages = [f"mpikfac.{path.parent.name}" for path in (ROOT / "mpikfac").glob("*/__init__.py")]
    for name in ("mpikfac", *packages, *MODULES):
        page = f"# {name}\n\n::: {name}\n"
        if name == "mpikfac":
            page += f"    options: {{inherited_members: true, members: {mpikfac.__all__}}}\n"
        shown.append(File.generated(config, f"reference/{name}.md", content=page))
    return shown
