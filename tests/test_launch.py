"""The tests' launcher: output, exit codes, and no process left behind."""

from __future__ import annotations

import subprocess
import uuid

import psutil
import pytest

from support.launch import launch


def test_output_and_environment_of_all_ranks():
    program = "import os; from mpi4py import MPI; print(os.environ['WORD'], MPI.COMM_WORLD.rank)"
    ended = launch(2, "-c", program, env={"WORD": "rank"})
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["0", "1", "rank", "rank"]


def test_one_failing_rank_ends_the_job():
    program = "from mpi4py import MPI; c = MPI.COMM_WORLD; assert c.rank == 0; c.barrier()"
    ended = launch(2, "-c", program)
    assert ended.returncode != 0
    assert "AssertionError" in ended.stderr


@pytest.mark.gate
def test_a_job_that_hangs_is_killed_with_all_its_ranks():
    mark = f"mark_{uuid.uuid4().hex}"
    with pytest.raises(subprocess.TimeoutExpired) as hung:
        launch(2, "-c", f"import time; print('{mark}', flush=True); time.sleep(600)", timeout=8)
    assert hung.value.__notes__[0].count(mark) == 2
    alive = psutil.process_iter(["cmdline"])
    assert not [p for p in alive if mark in " ".join(p.info["cmdline"] or [])]
