"""The program that measures a GPU, on the emulated device and with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from support.launch import environment, launcher
from support.pace import paced

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
# `compiled`, `before` and `final_small` measure what `compiled_small`, `eager` and `final` do.
HALVES = (
    ("health", "ranks", "orders", "captured"),
    ("ordinary", "compiled_small", "eager", "factors", "peer", "final"),
)
PARTS = {*HALVES[0], *HALVES[1]}

pytestmark = pytest.mark.gate


def measured(folder: Path, parts: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return the end of the program."""
    env = environment() | {"TRIAL": "1", "MPIKFAC_CUDA_AWARE": "1", "MPIRUN": launcher()[0]}
    return subprocess.run(
        [sys.executable, PROGRAM, folder, "--parts", *parts],
        **{"env": env, "capture_output": True, "text": True},
        **{"timeout": paced(500), "check": False},
    )


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """Return the folder of a trial, and what the program printed; halves run side by side."""
    folder = tmp_path_factory.mktemp("gpu")
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(partial(measured, folder), HALVES))
    texts = [ended.stdout + ended.stderr for ended in ends]
    assert [ended.returncode for ended in ends] == [0, 0], texts
    return folder, "".join(texts)


def test_all_parts_measure(trial):
    """Oracle: the rows: times of each round and counts, or in words what is missing."""
    folder, _ = trial
    assert {file.stem for file in folder.glob("*.json")} == PARTS
    for name in PARTS - {"health"}:
        result = json.loads((folder / f"{name}.json").read_text())
        assert result["trial"] and result["environment"]["device"] == "emulated device"
        for row in result["rows"]:
            if "missing" in row or "note" in row:
                continue
            assert all(ms > 0 for ms in row["wall_ms"])
            assert row.get("device_ms") is None  # the emulated device has no times
            assert row.get("kernels", 1) > 0


def test_k_fac_is_measured_beside_sgd(trial):
    """Oracle: SGD's rounds in the same part, and kernels of K-FAC's own."""
    folder, _ = trial
    for name in ("ordinary", "eager", "factors", "final"):
        rows = json.loads((folder / f"{name}.json").read_text())["rows"]
        by_name = {row["name"]: row for row in rows}
        for row in rows:
            if "wall_ms" in row:
                base = by_name[row["base"]]
                assert len(row["wall_ms"]) == len(base["wall_ms"])
                assert ("SGD" in row["name"]) or row.get("kernels", 10**9) > base["kernels"]


def test_messages_of_ranks_go_both_ways(trial):
    """Oracle: the stage that sends gradients, with a time in both ways."""
    folder, _ = trial
    rows = json.loads((folder / "ranks.json").read_text())["rows"]
    for way in ("staged", "direct"):
        stages = [row["stages_ms"] for row in rows if f"{way}: ordinary" in row["name"]]
        assert [each["reduce gradients"] > 0 for each in stages] == [True]


def test_the_table_ends_the_output(trial):
    """Oracle: a heading for each part with a result."""
    _, text = trial
    for name in PARTS:
        assert f"**{name}**: TRIAL, figures mean nothing; emulated device, " in text


def test_a_part_with_a_result_is_skipped(trial):
    """Oracle: the lines, and the files, which stay as they were."""
    folder, _ = trial
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    ended = measured(folder, sorted(PARTS))
    lines = {*ended.stdout.splitlines()[: len(PARTS)]}
    assert lines == {f"{name}: has a result" for name in PARTS}
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
