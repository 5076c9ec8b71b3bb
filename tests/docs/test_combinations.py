"""The site's list of combinations says what the code refuses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from mpikfac import MemOpt, Strategy, Transport

LIST = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "combinations.py"))["listing"]()
ROWS = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", LIST, re.MULTILINE)]


def test_a_refusal_stands_in_the_list():
    """Oracle: the line of the refusal."""
    with pytest.raises(ValueError) as refusal:
        Strategy(
            MemOpt(factor_reduction="reduce_scatter"),
            transport=Transport(fusion=2, owner_sums="alltoall"),
        )
    words = re.fullmatch(r"(\S+) needs (\S+), not \S+: (.+)", str(refusal.value))
    assert words
    choice, need, why = words.groups()
    (needs,) = [needs for name, needs, reason in ROWS if (name, reason) == (f"`{choice}`", why)]
    assert f"`{need}`" in needs


def test_the_list_has_every_table():
    """Oracle: a row of strategies, of split layers, of a preconditioner, of grafting, by hand."""
    choices = {choice for choice, _, _ in ROWS}
    assert choices >= {
        "`transport.virtual_ranks`",
        "`tp_size`",
        "`preconditioner='ekfac'`",
        "`grafting='quadratic-model'`",
    }
    assert len(ROWS) > 50
