"""The core of the library works without the laboratory and without predictions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.launch import PROGRAMS, launch

ROOT = Path(__file__).parents[2]


@pytest.mark.gate
def test_a_library_without_a_laboratory_trains_saves_and_resumes(tmp_path):
    """Oracle: the complete library's run without a stop, to the last bit."""
    core, program = tmp_path / "mpikfac", str(PROGRAMS / "core.py")
    beside = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mpikfac", core, ignore=beside)
    for room in ("lab", "predict"):
        shutil.rmtree(core / room)
    whole = launch(2, program, env={"PYTHONPATH": str(ROOT)})
    ended = launch(2, program, str(tmp_path), env={"PYTHONPATH": str(tmp_path)})
    assert (whole.returncode, ended.returncode) == (0, 0), whole.stderr + ended.stderr
    (of_whole, *expected), (of_core, *found) = whole.stdout.splitlines(), ended.stdout.splitlines()
    assert (of_whole, of_core) == (str(ROOT / "mpikfac"), str(core))
    assert len(expected) == 5 and found == expected
