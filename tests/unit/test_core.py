"""The core of the library: the size of a default step, and a library without its extensions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.launch import PROGRAMS, launch

ROOT = Path(__file__).parents[2]
BUDGET = {
    "executed lines": 1156,
    "functions": 322,
    "files": 50,
    "reading path, lines": 1849,
    "reading path, files": 40,
}
"""The most that a reader of a default step has to read; the numbers may only fall."""


@pytest.mark.gate
def test_a_default_step_is_short_to_read():
    """Oracle: the budget of lines, functions and files, counted by `benchmarks/core.py`."""
    ended = launch(4, str(ROOT / "benchmarks" / "core.py"))
    assert ended.returncode == 0, ended.stderr
    lines = (line.rpartition(": ") for line in ended.stdout.splitlines())
    counts = {name: int(count) for name, _, count in lines}
    assert all(counts[name] <= most for name, most in BUDGET.items()), ended.stdout


@pytest.mark.gate
def test_a_library_without_extensions_trains_saves_and_resumes(tmp_path):
    """Oracle: the complete library's run without a stop, to the last bit."""
    core, program = tmp_path / "mpikfac", str(PROGRAMS / "core.py")
    beside = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mpikfac", core, ignore=beside)
    for room in ("extensions", "predict"):
        shutil.rmtree(core / room)
    whole = launch(2, program, env={"PYTHONPATH": str(ROOT)})
    ended = launch(2, program, str(tmp_path), env={"PYTHONPATH": str(tmp_path)})
    assert (whole.returncode, ended.returncode) == (0, 0), whole.stderr + ended.stderr
    (of_whole, *expected), (of_core, *found) = whole.stdout.splitlines(), ended.stdout.splitlines()
    assert (of_whole, of_core) == (str(ROOT / "mpikfac"), str(core))
    assert len(expected) == 5 and found == expected
