"""Settings of the tests on several ranks (`mpirun -n 3 ... -m pytest -x tests/mpi`)."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import mpikfac
from support.problem import DEVICE

WORLD = mpikfac.world()
REPORTS = WORLD.rank == 0
SECONDS_PER_TEST = 300
STDERR = pytest.StashKey[int]()


HERE = Path(__file__).parent
if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)  # where tests make models and data of their own
    torch.backends.cudnn.deterministic = True  # tests compare bits of two runs


@pytest.fixture
def comm():
    """Return the communicator of all ranks."""
    return WORLD


@pytest.fixture
def made_on_the_host():
    """Let a test make tensors on the host, where the test names no device."""
    with torch.device("cpu"):
        yield


@pytest.fixture(autouse=True)
def _time_limit(request):
    # A rank that waits inside MPI sees no signal: a thread prints the place and ends the process.
    limit, stderr = SECONDS_PER_TEST, request.config.stash[STDERR]
    faulthandler.dump_traceback_later(limit, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark all but every fourth test as slow: each test is fast with one number of 1 to 4 ranks.

    On a GPU, all but every eighth test: staged and direct runs have other fast tests.
    """
    own = [item for item in items if item.path.is_relative_to(HERE)]
    turns, turn = 4, WORLD.size % 4
    if DEVICE.type != "cpu":
        turns, turn = 8, turn + 4 * mpikfac.comm.cuda_aware()
    for number, item in enumerate(own):
        if number % turns != turn:
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # pytest redirects 2 while a test runs
    if not REPORTS:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def pytest_runtest_logreport(report):
    if report.failed and not REPORTS:
        print(f"rank {WORLD.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr)


def pytest_sessionfinish(exitstatus):
    for thread in threading.enumerate():  # work in the background aborts a process that ends
        if thread.daemon and not isinstance(thread, threading._DummyThread):
            thread.join(timeout=2)
    if exitstatus and not REPORTS:
        time.sleep(2)  # a failing rank's exit ends the job: rank 0 first prints its own report
