"""Settings of the tests that run on several ranks (`mpirun -n 3 ... -m pytest -x tests/mpi`)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import mpikfac

WORLD = mpikfac.world()
REPORTS = WORLD.rank == 0


@pytest.fixture
def comm():
    """The communicator of all ranks."""
    return WORLD


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            # A rank inside an MPI call sees no signal: the thread method ends the process instead.
            item.add_marker(pytest.mark.timeout(60, method="thread"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not REPORTS:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def pytest_runtest_logreport(report):
    if report.failed and not REPORTS:
        print(f"rank {WORLD.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr)


def pytest_sessionfinish(exitstatus):
    if exitstatus and not REPORTS:
        time.sleep(2)  # a failing rank's exit ends the job: rank 0 first prints its own report
