"""Programs on a machine without an MPI library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mpikfac_apps.training import train

pytestmark = pytest.mark.gate

OPTIONS = ("--batch=120", "--data.train_images=360", "--epochs=2", "--log_every=1", "--threads=1")
TIMES = ("seconds", "images_per_second", "communication")
REMEDY = "install one with pip install 'mpikfac[mpi]', or load the module of your site's MPI"
NONE = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def program(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Return the end of `mpikfac ARGUMENTS` in a process that finds no MPI library."""
    command = [sys.executable, "-m", "mpikfac_apps", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | NONE | more)


def alone(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that say that the process works alone."""
    end = f": this process runs alone; for several ranks, {REMEDY}"
    return [line for line in ended.stderr.splitlines() if line.endswith(end)]


def rows(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key not in TIMES} for row in lines]


def test_one_rank_trains_without_mpi(tmp_path):
    """Oracle: the metrics of the same run with MPI; a resumed run; one line of warning."""
    assert train.main([*OPTIONS, f"--run_dir={tmp_path / 'with'}"]) == 0
    run = ("train", *OPTIONS, f"--run_dir={tmp_path / 'without'}", "--resume=auto")
    for more in (("--max_steps=4",), ()):
        ended = program(*run, *more)
        assert ended.returncode == 0, ended.stderr
        assert len(alone(ended)) == 1
    assert rows(tmp_path / "without") == rows(tmp_path / "with")


def test_a_model_is_checked_without_mpi():
    """Oracle: the program's verdict, by autograd."""
    ended = program("check", "digits_cnn")
    assert (ended.returncode, len(alone(ended))) == (0, 1), ended.stderr
    assert "Traceback" not in ended.stderr
    assert "All right" in ended.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_launcher_do_not_work_alone(tmp_path, rank):
    """Oracle: the launcher's variables; a single line of all ranks, and code 2."""
    there = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    ended = program("train", *OPTIONS, f"--run_dir={tmp_path / 'run'}", **there)
    assert ended.returncode == 2
    need = "mpikfac: OMPI_COMM_WORLD_SIZE=2, but several ranks need MPI (cannot load MPI library)"
    assert ended.stderr == ("" if rank else f"{need}: {REMEDY}\n")
    assert not (tmp_path / "run").exists()
