"""Count, by kind of step, how often the host waits for the device, and the kernels."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import NamedTuple

import emulated
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.problems import models

EVERY = {"factor_update_steps": 2, "inv_update_steps": 4}
# Later than the first passes with factors, in which gradients are compared with the calls.
KINDS = {9: "ordinary", 10: "with factors", 8: "with decompositions"}


class Step(NamedTuple):
    """What a step did.

    Attributes:
        waits: of the host, by reason and line of the library.
        kernels: started kernels.
        of_model: kernels of the forward and backward pass, with the recorded statistics.
    """

    waits: Counter[str]
    kernels: int
    of_model: int


def place() -> str:
    """Return the line of the library that runs."""
    for frame in reversed(traceback.extract_stack()):
        if "/mpikfac/" in frame.filename:
            return f"{frame.filename.rpartition('/mpikfac/')[2]}:{frame.lineno}"
    return "outside"


def steps_of(
    name: str,
    size: int,
    batch: int = 4,
    momentum: float = 0.9,
    stored: torch.memory_format = torch.contiguous_format,
    **settings: object,
) -> dict[str, Step]:
    """Return the steps of K-FAC with a network and a batch of images, by kind.

    Args:
        momentum: of SGD.
        stored: the order of the elements of images and weights.
    """
    comm = mpikfac.world()
    device = mpikfac.device(comm, "cuda")
    torch.manual_seed(0)
    model = models.build(name, classes=10).to(device, memory_format=stored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    kfac = mpikfac.KFAC(model, optimizer, comm, **EVERY, **settings)
    images = torch.randn(batch, 3, size, size).to(device, memory_format=stored)
    labels = torch.randint(10, (batch,)).to(device)
    waits: Counter[str] = Counter()
    kernels = 0

    def tell(kind: str, name: str) -> None:
        nonlocal kernels
        if kind == "kernel":
            kernels += 1
        else:
            waits[f"{name} in {place()}"] += 1

    found = {}
    for step in range(max(KINDS) + 1):
        optimizer.zero_grad()
        waits, kernels = Counter(), 0
        with emulated.watched(tell):
            F.cross_entropy(model(images), labels).backward()
            of_model = kernels
            kfac.step()
        if step in KINDS:
            found[KINDS[step]] = Step(waits, kernels, of_model)
    return found
