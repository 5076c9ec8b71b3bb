"""Settings of the tests on several ranks (`mpirun -n 3 ... -m pytest -x tests/mpi`)."""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
from torch import distributed

import mpikfac
from support.pace import paced
from support.problem import DEVICE

WORLD = mpikfac.world()
REPORTS = WORLD.rank == 0
SECONDS_PER_TEST = paced(300)
STDERR = pytest.StashKey[int]()
FAILED = pytest.StashKey[bool]()


HERE = Path(__file__).parent
if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)  # where tests make models and data of their own
    torch.backends.cudnn.deterministic = True  # tests compare bits of two runs


@pytest.fixture
def comm():
    """Return the communicator of all ranks."""
    return WORLD


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    """Let torch.distributed connect the processes, too."""
    place = WORLD.bcast(str(tmp_path_factory.mktemp("gloo")) if WORLD.rank == 0 else None)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{place}/store",
        rank=WORLD.rank,
        world_size=WORLD.size,
        timeout=datetime.timedelta(seconds=60),
    )
    yield
    distributed.destroy_process_group()


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
    """Mark the cases of a parametrised test by lane; a test without parameters is a single case.

    Of every second test, the first case is quick on two ranks, and of every other test, the last
    case on three ranks. In the gate are the same cases of the other halves, the first case of every
    second test on four ranks, and a third of the remaining cases, on either two or three ranks.
    On a GPU, each case is quick on one number of 1 to 4 ranks, either staged or direct.
    """
    tests = {}
    for item in items:
        if item.path.is_relative_to(HERE):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    ranks = WORLD.size
    for test, cases in tests.items():
        number = zlib.crc32(test.encode())  # else all tests with one case would have the same turn
        first, last = cases[0], cases[-1]
        quick = {2: None if number % 2 else first, 3: last if number % 2 else None}.get(ranks)
        for turn, case in enumerate(cases, number):
            if DEVICE.type != "cpu":
                if turn % 8 != ranks % 4 + 4 * mpikfac.comm.cuda_aware():
                    case.add_marker("slow")
            elif case is not quick:
                chosen = {
                    2: case is first or turn % 6 == 0,
                    3: case is last or turn % 6 == 3,
                    4: case is first and turn % 2 == 0,
                }
                more = case is first and ranks > 4
                case.add_marker("gate" if chosen.get(ranks, more) else "slow")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.stash[STDERR] = os.dup(2)  # pytest redirects 2 while a test runs
    if not REPORTS:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def pytest_runtest_logreport(report):
    if report.failed and not REPORTS:
        print(f"rank {WORLD.rank}: {report.nodeid}\n{report.longreprtext}", file=sys.stderr)


def pytest_sessionfinish(session, exitstatus):
    failed = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    session.config.stash[FAILED] = failed
    for thread in threading.enumerate():  # work in the background aborts a process that ends
        own = thread.name == "mpikfac watch"  # ends when the process does
        if thread.daemon and not own and not isinstance(thread, threading._DummyThread):
            thread.join(timeout=paced(2))
    if failed and not REPORTS:
        # A failing rank ends the job: rank 0 first prints its own report.
        time.sleep(paced(2))


def pytest_unconfigure(config):
    """End the job if a test failed here: other ranks may wait for this rank."""
    if config.stash.get(FAILED, False) and WORLD.size > 1:
        sys.stdout.flush()
        time.sleep(paced(1))
        WORLD.Abort(1)
