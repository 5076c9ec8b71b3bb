from __future__ import annotations

import math

import pytest
import torch

from mpikfac import UserError
from mpikfac.numerics import all_finite, not_finite
from support.inside import TOLERATED, Nonfinite


def test_numbers_are_counted_and_told_once_in_a_row(caplog):
    """Oracle: two streaks of 'a' and a streak of 'b', as one line per streak."""
    nonfinite = Nonfinite(rank=3)
    for step, names in enumerate([["a"], ["a", "b"], [], ["a", "b"]]):
        nonfinite.note("gradient", names, step, "left out")
    assert nonfinite.counts == {"gradient": 5}
    assert caplog.messages == [
        "rank 3, step 0: NaN or infinity in the gradient of 'a'; left out",
        "rank 3, step 1: NaN or infinity in the gradient of 'b'; left out",
        "rank 3, step 3: NaN or infinity in the gradient of 'a' and 1 more; left out",
    ]


def test_counts_are_shown_on_a_line():
    """Oracle: the lines, written out."""
    nonfinite = Nonfinite(rank=3)
    assert repr(nonfinite) == "Nonfinite(rank 3: all values were finite)"
    nonfinite.note("gradient", ["a", "b"], 0, "")
    nonfinite.note("decomposition", ["a"], 0, "")
    assert repr(nonfinite) == "Nonfinite(rank 3: gradient 2, decomposition 1)"


def test_a_streak_ends_the_run_and_a_pause_begins_a_new_one():
    """Oracle: the tolerated number of times, by kind and name."""
    nonfinite = Nonfinite(rank=0)
    for step in range(TOLERATED):
        nonfinite.note("gradient", ["a"], step, "")
        nonfinite.note("statistics", ["a"], step, "")
    nonfinite.note("gradient", [], TOLERATED, "")
    nonfinite.note("gradient", ["a"], TOLERATED + 1, "")
    with pytest.raises(UserError, match="rank 0, step 9: .* in the statistics of 'a'"):
        nonfinite.note("statistics", ["a"], 9, "")


def test_a_streak_outlasts_what_was_tried_in_between():
    """Oracle: by hand: "b" is not tried together with "a", and works at the last step but one."""
    nonfinite = Nonfinite(rank=0)
    for step in range(TOLERATED):
        nonfinite.note("decomposition", ["a"], step, "", tried=["a", "c"])
        nonfinite.note("decomposition", ["b"], step, "", tried=["b"])
    nonfinite.note("decomposition", [], TOLERATED, "", tried=["b"])
    nonfinite.note("decomposition", ["b"], TOLERATED, "", tried=["b"])
    with pytest.raises(
        UserError, match=rf"{TOLERATED + 1} times .* in the decomposition of 'a'; check"
    ):
        nonfinite.note("decomposition", ["a"], TOLERATED, "", tried=["a"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found(bad):
    blocks = {"a": torch.ones(3), "b": torch.tensor([1.0, bad]), "c": torch.tensor([])}
    assert [all_finite(block) for block in blocks.values()] == [True, False, True]
    assert not_finite(blocks) == ["b"]
    assert not all_finite(torch.tensor([math.inf, -math.inf]))
