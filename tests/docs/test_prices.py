"""The table on the page about preconditioners is made of the raw results, and these are current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpikfac

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "preconditioners.md"
MACHINE = "a100-hdr"


@pytest.fixture
def prices(monkeypatch):
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import prices

    return prices


@pytest.fixture(scope="module")
def rows():
    """Return the raw results."""
    return json.loads((ROOT / "benchmarks" / "results" / "prices.json").read_text())


def test_the_table_is_that_of_the_raw_results(prices, rows):
    """Oracle: the raw results."""
    lines = prices.summary([row for row in rows if row["machine"] == MACHINE])
    assert "\n".join(lines) in PAGE.read_text()


@pytest.mark.gate
@pytest.mark.parametrize("method", ["Shampoo", "Muon"])
def test_raw_results_are_what_the_program_predicts(prices, rows, method):
    """Oracle: a prediction of today."""
    network, ranks = "resnet50", 8
    work, machine = prices.work_of(prices.NETWORKS[network]), mpikfac.predict.load_machine(MACHINE)
    machine = prices.scaled(machine, network, work, work)
    (chosen,) = (one for one in prices.METHODS if one.name == method)
    found = prices.price(machine, network, work, chosen, ranks) | {"machine": MACHINE}
    keys = ("machine", "network", "method", "ranks")
    (row,) = (row for row in rows if all(row[key] == found[key] for key in keys))
    assert found["strategy"] == row["strategy"]
    for key in ("seconds", "sent", "memory"):
        assert found[key] == pytest.approx(row[key], rel=1e-6)


def test_first_order_methods_differ_by_their_vectors(prices):
    """Oracle: by hand: two vectors and seven passes of AdamW, a vector and five passes of SGD."""
    others = [("weight", (4096,))]
    work = prices.Work([], [], others, 1, 1, 4096)
    machine = mpikfac.predict.load_machine(MACHINE)
    sgd, adamw = (prices.price(machine, "resnet50", work, way, 1) for way in prices.METHODS[:2])
    assert adamw["memory"] - sgd["memory"] == 4 * 4096
    step = machine.network("resnet50", 32).optimizer
    assert adamw["seconds"] - sgd["seconds"] == pytest.approx(2 / 5 * step)


def test_hollow_marks_are_strategies_that_do_not_shard_the_optimizer(prices, rows):
    """Oracle: by hand: the stored strategies whose owners do not update their layers alone."""
    whole = {row["strategy"] for row in rows if not prices.shards(row)}
    assert whole == {"one sum", "overlapped", "hybrid", "spd-kfac"}
