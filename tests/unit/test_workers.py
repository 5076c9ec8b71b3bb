"""MPI starts when a program requests it: no import and no data loader worker starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.launch import PROGRAMS, launch

PROGRAM = str(PROGRAMS / "workers.py")
WAYS = ["fork", "spawn", "forkserver"]
IMPORTS = """
import importlib, pkgutil, sys
import mpikfac
for name in mpikfac.__all__:
    getattr(mpikfac, name)
for module in pkgutil.walk_packages(mpikfac.__path__, "mpikfac."):
    importlib.import_module(module.name)
assert "mpi4py.MPI" not in sys.modules
size = mpikfac.world().size
assert "mpi4py.MPI" in sys.modules
print(size)
"""


@pytest.mark.gate
def test_no_import_starts_mpi():
    """Oracle: the loaded modules; mpi4py.MPI starts MPI."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.gate
def test_workers_of_a_loader_do_not_start_mpi():
    """Oracle: the weights without workers, to the last bit, on two ranks."""
    ended = {way: launch(2, PROGRAM, way, timeout=60) for way in ["none", *WAYS]}
    assert all(job.returncode == 0 for job in ended.values()), [
        job.stderr for job in ended.values()
    ]
    (text,) = {job.stdout for job in ended.values()}
    assert text.startswith("2 ")


@pytest.mark.gate
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_asks_for_mpi_in_a_worker_ends_at_once(way):
    """Oracle: the line and the code; a forked worker imports nothing anew."""
    ended = launch(2, PROGRAM, way, "top", timeout=60)
    line = "mpikfac: a worker process must not start MPI, which its rank has already started: call"
    assert (ended.returncode == 0, line in ended.stderr) == (way == "fork", way != "fork")


@pytest.mark.gate
def test_a_process_of_multiprocessing_without_a_launcher_is_a_job_of_its_own():
    """Oracle: one rank, as in any process without a launcher."""
    code = (
        "import multiprocessing as m, mpikfac\n"
        "p = m.get_context('spawn').Pool(1)\n"
        "print(p.apply(eval, ('__import__(\"mpikfac\").world().size',)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
