"""Two checkouts run alternately, and each run measures the library of its own checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch import environment
from support.pace import paced

ROOT = Path(__file__).parents[2]
MB = 400


def paired(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return the end of the program."""
    command = [sys.executable, ROOT / "benchmarks" / "paired.py", *arguments]
    seconds = paced(120)
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.gate
def test_a_library_that_holds_memory_is_found(tmp_path):
    """Oracle: the copy of the library, which holds 400 MB, is otherwise the same library."""
    shutil.copytree(ROOT / "mpikfac", tmp_path / "mpikfac")
    (tmp_path / "apps").symlink_to(ROOT / "apps")
    with (tmp_path / "mpikfac" / "__init__.py").open("a") as library:
        library.write(f"\n_HELD = b'1' * {MB * 10**6}\n")
    small = ("--rounds", "1", "--steps", "1", "--batch", "2")
    ended = paired(ROOT, tmp_path, *small)
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(
        r"^\| (\w+ \w+), \w+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ", ended.stdout, re.M
    )
    assert [name for name, *_ in rows] == ["CPU time", "wall time", "peak memory"]
    old, new, ratio = map(float, rows[-1][1:])
    assert new - old == pytest.approx(MB, abs=100)
    assert ratio == pytest.approx(new / old, abs=0.001)


@pytest.mark.gate
def test_a_folder_without_a_library_is_refused(tmp_path):
    """Oracle: the line that names the folder and the remedy."""
    ended = paired(ROOT, tmp_path)
    assert ended.returncode != 0
    line = f"{tmp_path} is no checkout of mpikfac: name a folder that holds mpikfac/ and apps/"
    assert ended.stderr.splitlines() == [line]
