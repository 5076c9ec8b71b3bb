"""Clients of asynchronous training go on when a client dies, under an MPI that survives."""

from __future__ import annotations

import re
import subprocess

import pytest

from support.launch import PROGRAMS, launch, launcher

pytestmark = [pytest.mark.lab, pytest.mark.slow]
STEPS = 20


def open_mpi_5():
    version = subprocess.run([launcher()[0], "--version"], capture_output=True, text=True).stdout
    return re.search(r"\(Open MPI\) 5\.", version) is not None


@pytest.mark.skipif(not open_mpi_5(), reason="needs Open MPI 5's mpirun --with-ft ulfm")
@pytest.mark.parametrize(("client", "step"), [(1, 5), (0, 0)])
def test_a_dead_client_is_dropped_and_named(monkeypatch, client, step):
    """Oracle: the updates: all of the living clients, and of the dead one those before its end."""
    monkeypatch.setenv("MPIRUN_FLAGS", f"{' '.join(launcher()[1])} --with-ft ulfm")
    job = launch(4, str(PROGRAMS / "lost_client.py"), str(client), str(step))
    taken = [step if number == client else STEPS for number in range(3)]
    lines = job.stdout.splitlines()
    assert f"served {' '.join(map(str, taken))}" in lines, job.stderr
    assert lines.count(f"met at {sum(taken)}") == 2
    assert f"client {client} is lost; 2 clients continue" in job.stderr
