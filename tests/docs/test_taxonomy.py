"""The page of the taxonomy is what its script prints, and places every named strategy."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from mpikfac.plan import NAMED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extensions" / "taxonomy.md").read_text()
PROGRAM = runpy.run_path(str(ROOT / "docs" / "taxonomy.py"))


def test_the_page_is_what_the_script_prints():
    """Oracle: the script, which places all strategies anew."""
    assert "\n".join(PROGRAM["page"]()) + "\n" == PAGE


def test_both_tables_have_every_strategy_once():
    """Oracle: the catalogue."""
    for part in PAGE.split("## Communication"):
        cells = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
        names = Counter(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
        assert names == Counter(NAMED.keys())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("kfac-lw", "decompositions, directions; centralised; synchronous; Allreduce, Bcast"),
        ("comm-opt", "decompositions; centralised; synchronous; Allreduce"),
        (
            "sharded-optimizer",
            "decompositions, directions, steps; centralised; synchronous; "
            "Reduce_scatter, Allgatherv",
        ),
        ("eva", "none; centralised; synchronous; Allreduce"),
        ("dgc", "decompositions; centralised; synchronous; Allgather"),
        ("diloco", "decompositions; decentralised; synchronous; Allreduce"),
        ("lsgd", "decompositions; decentralised; synchronous; Bcast"),
        ("downpour", "none; centralised; asynchronous; Send to a server, and back"),
    ],
)
def test_places_of_langer_et_al(name, place):
    """Oracle: by hand, from the publications of the strategies."""
    assert "; ".join(PROGRAM["langer"](name).values()) == place
