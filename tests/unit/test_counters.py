"""The bytes that MPI counts for the messages of a plan, compared with the plan's bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launch import launch

PROGRAM = str(Path(__file__).parents[2] / "benchmarks" / "counters.py")
COUNTING = {"OMPI_MCA_pml": "^cm", "OMPI_MCA_pml_monitoring_enable": "1"}
AGREEMENTS = 2000  # bytes at most, of 7 messages

pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the lines of strategies at 4 ranks, by strategy, stage and primitive."""
    file = tmp_path_factory.mktemp("counters") / "counters.jsonl"
    strategies = ("comm-opt", "balanced-shards", "spd-kfac")
    ended = launch(4, PROGRAM, "--strategies", *strategies, "--append", str(file), env=COUNTING)
    if "counts no bytes" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[0])
    assert ended.returncode == 0, ended.stderr
    rows = map(json.loads, file.read_text().splitlines())
    return {(row["strategy"], row["stage"], row["primitive"]): row for row in rows}


@pytest.mark.parametrize(
    ("stage", "primitive"),
    [
        ("reduce statistics", "Allreduce"),
        ("reduce gradients", "Allreduce"),
        ("reduce statistics", "Isend, Irecv"),
        ("publish weights", "Isend, Irecv"),
    ],
)
def test_the_plan_has_the_bytes_that_mpi_counts(lines, stage, primitive):
    """Oracle: the counters of Open MPI, at 4 ranks, of rings and of messages between two ranks."""
    row = lines["comm-opt" if primitive == "Allreduce" else "balanced-shards", stage, primitive]
    assert row["busiest"] == row["busiest, plan"] > 0
    assert row["all ranks"] == row["all ranks, plan"]


def test_no_rank_sends_more_of_an_overlapped_sum_than_of_a_ring(lines):
    """Oracle: the counters of Open MPI; in place, the busiest rank would send a third more."""
    row = lines["spd-kfac", "reduce statistics", "Allreduce"]
    assert row["busiest, plan"] <= row["busiest"] <= row["busiest, plan"] + AGREEMENTS
