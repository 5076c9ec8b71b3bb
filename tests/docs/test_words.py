"""The pages are short: no page has more words than its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGETS = {  # words between blanks, tables and code included
    "README.md": 600,
    "CHANGELOG.md": 1600,
    "CONTRIBUTING.md": 1300,
    "SECURITY.md": 300,
    "docs/start/coming_from.md": 900,
    "docs/start/faq.md": 800,
    "docs/start/install.md": 400,
    "docs/start/tutorial.md": 800,
    "docs/guide/check.md": 450,
    "docs/guide/checkpoint.md": 1000,
    "docs/guide/clusters.md": 2500,
    "docs/guide/compile.md": 400,
    "docs/guide/data.md": 1200,
    "docs/guide/decision.md": 850,  # 200 of them in tables that the simulator prints
    "docs/guide/long_runs.md": 1500,
    "docs/guide/own_script.md": 1960,
    "docs/guide/preconditioners.md": 1200,
    "docs/guide/training.md": 2300,
    "docs/guide/tuning.md": 950,
    "docs/ideas/architecture.md": 2400,
    "docs/ideas/curvature.md": 3000,
    "docs/ideas/gradient.md": 850,
    "docs/ideas/lengths.md": 1450,
    "docs/ideas/plan.md": 1200,
    "docs/ideas/strategies.md": 2500,
    "docs/extensions/advice.md": 400,
    "docs/extensions/codistillation.md": 400,
    "docs/extensions/detection.md": 800,
    "docs/extensions/emulated_cluster.md": 500,
    "docs/extensions/exchange.md": 1700,
    "docs/extensions/graphs.md": 400,
    "docs/extensions/feedback.md": 400,
    "docs/extensions/language.md": 600,
    "docs/extensions/populations.md": 400,
    "docs/extensions/prediction.md": 1500,
    "docs/extensions/recommendation.md": 400,
    "docs/extensions/scoreboard.md": 800,  # a script writes it
    "docs/extensions/search.md": 200,
    "docs/extensions/split_layers.md": 1100,
    "docs/extensions/study.md": 1200,
    "docs/extensions/taxonomy.md": 850,  # a script writes it
    "docs/extensions/trace.md": 1000,
    "docs/extensions/validation.md": 850,
    "docs/extensions/volumes.md": 400,
    "docs/reference/failures.md": 4400,
    "docs/reference/glossary.md": 1000,
    "docs/reference/gpu.md": 1150,
    "docs/reference/models.md": 700,  # a test writes it
    "docs/reference/references.md": 2300,
    "docs/decisions/index.md": 1100,
    "benchmarks/README.md": 900,
}
FOLDERS = {"docs/decisions": 130, "benchmarks/results": 400}  # of a page without a line above
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
NAMES = sorted(str(page.relative_to(ROOT)) for page in PAGES)


def budget(name: str) -> int | None:
    """Return the budget of a page; None without one."""
    return BUDGETS.get(name, FOLDERS.get(str(Path(name).parent)))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_keeps_its_budget(name):
    """Oracle: the table. A page without a line needs one."""
    words = budget(name)
    assert words is not None, f"{name} has no budget"
    assert len((ROOT / name).read_text().split()) <= words


def test_the_table_names_existing_pages():
    """Oracle: the files."""
    assert set(BUDGETS) <= set(NAMES)


def test_a_page_has_a_budget_by_its_name_or_its_folder():
    """Oracle: by hand."""
    assert budget("README.md") == 600
    assert budget("benchmarks/results/step_time.md") == 400
    assert budget("docs/decisions/index.md") == 1100
    assert budget("new.md") is None
