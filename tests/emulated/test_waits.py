"""How often a step makes the host wait for the device, and how many kernels a step starts."""

from __future__ import annotations

import sys

import pytest

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)
from counting import steps_of

import mpikfac

MOST_WAITS = 3  # beside the waits inside torch.linalg.eigh, which looks for failures
MOST_KERNELS = {"ordinary": 400, "with factors": 1050, "with decompositions": 1200}
ORTHOGONALISING = 195  # kernels more, in every step


@pytest.mark.parametrize(("length", "more"), [("adam", 0), ("orthogonal", ORTHOGONALISING)])
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_a_step_waits_seldom_and_starts_few_kernels(solver, length, more):
    """Oracle: the counts of the emulated device, by kind of step of ResNet-20."""
    choices = {"solver": solver, "length": mpikfac.Length(length)}
    for kind, step in steps_of("resnet20", 32, **choices).items():
        waits = {where: count for where, count in step.waits.items() if "eigh" not in where}
        assert sum(waits.values()) <= MOST_WAITS, waits
        assert step.kernels <= MOST_KERNELS[kind] + more


def test_statistics_copy_patches_for_any_batch():
    """Oracle: the count of the emulated device; autocorrelations start 374 kernels more."""
    steps = steps_of("resnet20", 32, 64, solver="inverse")
    assert steps["with factors"].kernels <= 900
