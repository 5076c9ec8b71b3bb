"""docs/guide/clusters.md names the existing job scripts."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_every_script_and_none_that_is_missing():
    """Oracle: the files under jobs/."""
    page = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    named = set(re.findall(r"(?<!tests/)jobs/\w+/\w+\.\w+", page))
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "jobs").glob("*/*.*")}
    configs = {path for path in there if path.startswith("jobs/configs/")}
    assert named - configs == there - configs
    assert named <= there
