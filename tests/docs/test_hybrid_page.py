"""The program on the page about split layers runs unchanged, under MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launch import launch

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "split_layers.md"


@pytest.mark.gate
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_runs(tmp_path, ranks):
    """Oracle: the exit code, and the layers in the table that the program prints."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    done = launch(ranks, str(path))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[2:5]] == ["0", "2", "4"]
