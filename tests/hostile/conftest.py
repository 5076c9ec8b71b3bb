from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def mpi_goes_on(monkeypatch):
    """Keep MPI alive for later tests: a program with an error code would end MPI."""
    monkeypatch.setattr("mpikfac.comm.mpi.MPI.Finalize", lambda: None)
