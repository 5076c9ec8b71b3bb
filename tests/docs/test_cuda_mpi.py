"""The pages about GPUs: programs run, and named settings and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mpikfac import comm
from support.launch import launch

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "clusters.md"
TRIED = PAGE.parents[1] / "reference" / "gpu.md"


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_check_passes_on_every_rank(tmp_path, ranks):
    """Oracle: the program's own sums."""
    program = tmp_path / "check.py"
    program.write_text(next(code for code in blocks("python") if "Grid" in code))
    job = launch(ranks, str(program), env={"MPIKFAC_CUDA_AWARE": "0"})
    assert job.returncode == 0, job.stderr
    found = sorted(job.stdout.splitlines())
    assert [line.split(":")[0] for line in found] == [f"rank {r} of {ranks}" for r in range(ranks)]


def test_the_check_fails_where_a_collective_is_wrong(tmp_path):
    """Oracle: an omitted sum over ranks."""
    program = tmp_path / "check.py"
    check = next(code for code in blocks("python") if "Grid" in code)
    program.write_text(check.replace('send("Allreduce",', "print("))
    assert "AssertionError" in launch(2, str(program)).stderr


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9")
def test_the_setting_of_torch_exists():
    """Oracle: torch, which refuses unknown names, and the setting read afterwards."""
    (code,) = (code for code in blocks("python") if "fp32_precision" in code)
    job = launch(1, "-c", f"{code}print(torch.backends.cudnn.conv.fp32_precision)")
    assert job.stdout == "ieee\n", job.stderr


def test_the_variables_of_mpikfac_are_read(monkeypatch):
    """Oracle: the answer forced by a variable."""
    assert set(re.findall(r"MPIKFAC_\w+", PAGE.read_text())) == {"MPIKFAC_CUDA_AWARE"}
    for value in ("0", "1"):
        monkeypatch.setenv("MPIKFAC_CUDA_AWARE", value)
        assert comm.cuda_aware() == (value == "1")


def test_the_named_tests_exist():
    """Oracle: the functions of the test files; every fault planted on the device is named."""
    tests = PAGE.parents[2] / "tests"
    there = {name for path in tests.rglob("test_*.py") for name in defined(path)}
    named = set(re.findall(r"`(test_\w+)`", TRIED.read_text()))
    assert named <= there
    assert len(named & set(defined(tests / "emulated" / "test_device.py"))) == 8


def defined(path: Path) -> list[str]:
    """Return the names of a file's tests."""
    return re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
