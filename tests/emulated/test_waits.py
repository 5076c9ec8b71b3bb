"""How often a step makes the host wait for the device, and how many kernels a step starts."""

from __future__ import annotations

import sys
import traceback
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.problems import models

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)
import emulated

MOST_WAITS = 3  # beside those of torch.linalg.eigh, which looks for failures itself
KERNELS = {  # of a step of ResNet-20: ordinary, with factors, with decompositions
    "inverse": (420, 1100, 1450),
    "eigen": (420, 1200, 1750),
}


def place() -> str:
    """Return the line of the library that runs."""
    for frame in reversed(traceback.extract_stack()):
        if "/mpikfac/" in frame.filename:
            return f"{frame.filename.rpartition('/mpikfac/')[2]}:{frame.lineno}"
    return "outside"


@pytest.mark.parametrize("solver", KERNELS)
def test_a_step_waits_seldom_and_starts_few_kernels(solver):
    """Oracle: waits and kernels of the emulated device, by kind of step."""
    comm = mpikfac.world()
    device = mpikfac.device(comm, "cuda")
    torch.manual_seed(0)
    model = models.build("resnet20", classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = mpikfac.KFAC(model, optimizer, comm, solver=solver, factor_every=2, basis_every=4)
    images = torch.randn(4, 3, 16, 16).to(device)
    labels = torch.randint(10, (4,)).to(device)
    waits: list[Counter[str]] = []
    kernels: list[int] = []

    def tell(kind: str, name: str) -> None:
        if kind == "kernel":
            kernels[-1] += 1
        elif "eigh" not in name:
            waits[-1][f"{name} in {place()}"] += 1

    for _ in range(7):
        optimizer.zero_grad()
        waits.append(Counter())
        kernels.append(0)
        with emulated.watched(tell):
            F.cross_entropy(model(images), labels).backward()
            kfac.step()
    for seen in waits[4:]:
        assert seen.total() <= MOST_WAITS, seen
    decomposing, ordinary, factors = kernels[4:]
    for found, most in zip((ordinary, factors, decomposing), KERNELS[solver]):
        assert found <= most
