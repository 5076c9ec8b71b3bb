"""How often renewed decompositions make the host wait for the device."""

from __future__ import annotations

import sys

import pytest

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)
from counting import steps_of

from mpikfac import Eigen, Inverse, MemOpt, Refresh, Strategy

MOST_WAITS = 3  # of a refresh that renews all factors: one for all misfits


@pytest.mark.parametrize(
    "preconditioner", [Eigen(iterations=1), Eigen(), Inverse()], ids=["iterated", "kept", "inverse"]
)
def test_a_refresh_waits_once_for_all_misfits(preconditioner):
    """Oracle: the counts of the emulated device; nothing is decomposed, as all factors fit."""
    strategy = Strategy(MemOpt(), refresh=Refresh(tolerance=1e9))
    step = steps_of("resnet20", 32, preconditioner=preconditioner, strategy=strategy)[
        "with decompositions"
    ]
    assert not [where for where in step.waits if "eigh" in where or "cholesky" in where]
    assert sum(step.waits.values()) <= MOST_WAITS, step.waits


def test_orders_are_iterated_together():
    """Oracle: the counts of the emulated device: by kernels of ten orders, not of 40 factors."""
    kernels = [
        steps_of(
            "resnet20",
            32,
            preconditioner=preconditioner,
            strategy=Strategy(MemOpt(), refresh=Refresh(tolerance=1e9)),
        )["with decompositions"].kernels
        for preconditioner in (Eigen(), Eigen(iterations=1))
    ]
    assert kernels[1] - kernels[0] <= 10 * 12, kernels
