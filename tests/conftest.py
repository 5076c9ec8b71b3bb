"""Settings of all tests: one thread per process, property tests with constant examples."""

from __future__ import annotations

import signal

import hypothesis
import pytest
import torch

from mpikfac.comm import Grid

torch.set_num_threads(1)

# Under MPI every rank must draw the same examples; a loaded machine must not fail a deadline.
hypothesis.settings.register_profile("mpikfac", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("mpikfac")

SIGTERM = signal.getsignal(signal.SIGTERM)


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
