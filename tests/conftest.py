"""Settings of all tests: one thread, property tests with constant examples, limits of time."""

from __future__ import annotations

import signal

import hypothesis
import pytest
import torch

from mpikfac.comm import Grid
from mpikfac.plan import Choice
from support.pace import paced

torch.set_num_threads(1)

# Under MPI every rank must draw the same examples; a loaded machine must not fail a deadline.
hypothesis.settings.register_profile("mpikfac", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("mpikfac")

SIGTERM = signal.getsignal(signal.SIGTERM)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val):
    """Return the name of a case with a method as a value: the call that makes the method."""
    return repr(val) if isinstance(val, Choice) else None


def pytest_collection_modifyitems(config, items):
    """Let the limits of all tests grow on a slow machine."""
    option = config.getoption("timeout")
    usual = float(config.getini("timeout")) if option is None else option
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = paced(own.args[0] if own else usual)
        item.add_marker(pytest.mark.timeout(limit), append=False)


@pytest.fixture(autouse=True)
def former_signals():
    """Restore SIGTERM: finished runs ignore SIGTERM, and later tests' processes would, too."""
    signal.signal(signal.SIGTERM, SIGTERM)


@pytest.fixture(autouse=True)
def freed_communicators(monkeypatch):
    """Free all communicators of a test's trainers: MPICH has 2,048 communicators in a process."""
    grids = []
    made = Grid.__init__

    def remembered(self, *arguments, **settings):
        made(self, *arguments, **settings)
        grids.append(self)

    monkeypatch.setattr(Grid, "__init__", remembered)
    yield
    for grid in grids:
        grid.free()
