"""How often a step makes the host wait for the device, and how many kernels a step starts."""

from __future__ import annotations

import sys

import pytest

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)
from counting import steps_of

import mpikfac

MOST_WAITS = {"ordinary": 1, "with factors": 1, "with decompositions": 2}
MOST_KERNELS = {"ordinary": 305, "with factors": 680, "with decompositions": 870}
OF_EIGENBASES = 25  # kernels more: a direction has two products more, and a division


@pytest.mark.parametrize(("preconditioner", "more"), [("inverse", 0), ("eigen", OF_EIGENBASES)])
def test_a_step_waits_seldom_and_starts_few_kernels(preconditioner, more):
    """Oracle: the counts of the emulated device, by kind of step of ResNet-20."""
    for kind, step in steps_of("resnet20", 32, preconditioner=preconditioner).items():
        # torch.linalg.eigh waits to look for failures.
        waits = {where: count for where, count in step.waits.items() if "eigh" not in where}
        assert sum(waits.values()) <= MOST_WAITS[kind], waits
        assert step.kernels <= MOST_KERNELS[kind] + more


def test_a_larger_network_has_few_kernels():
    """Oracle: the count of the emulated device for ResNet-50, whose layers have 21 shapes."""
    assert steps_of("resnet50", 32)["ordinary"].kernels <= 770


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("preconditioner", ["inverse", "eigen"])
def test_a_deeper_network_starts_no_more_kernels_of_directions(preconditioner, momentum):
    """Oracle: the count for a network with fewer layers of the same shapes."""
    grafting = mpikfac.AdamGrafting(momentum=momentum)
    shallow, deep = (
        steps_of(name, 32, momentum=0.0, preconditioner=preconditioner, grafting=grafting)[
            "ordinary"
        ]
        for name in ("resnet20", "resnet32")
    )
    assert deep.kernels - deep.of_model == shallow.kernels - shallow.of_model


def test_statistics_copy_patches_for_any_batch():
    """Oracle: the count of the emulated device; autocorrelations start 374 kernels more."""
    steps = steps_of("resnet20", 32, 64, preconditioner="inverse")
    assert steps["with factors"].kernels <= 900
