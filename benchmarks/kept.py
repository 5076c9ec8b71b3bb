"""Measure errors of directions and savings with averages and decompositions in bfloat16.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/kept.py --data DIR --steps 60

ResNet-20 is trained on CIFAR-10. K-FAC with other dtypes gets the same batches and weights at every
step. Errors are relative errors of directions before any clip, medians over layers and over the
last refresh's steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac.preconditioners import named_preconditioner
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import batches
from mpikfac_apps.training.augmentation.moves import Augmentation
from support import inside

BF16 = torch.bfloat16
WAYS = {  # dtypes of averages and of decompositions
    "`factor_dtype`": (BF16, None),
    "`Preconditioner.dtype`": (None, BF16),
    "both": (BF16, BF16),
}
EVERY = 10  # steps between refreshes


def main() -> None:
    """Print a row for each preconditioner, damping and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="directory of CIFAR-10")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| preconditioner | damping | kept in bfloat16 | error | worst layer | "
        "averages, bases, MB |"
    )
    print("|---|---|---|---|---|---|")
    for preconditioner in ("eigen", "inverse"):
        for damping in (0.03, 0.003):
            for way, row in compared(options, preconditioner, damping).items():
                print(f"| {preconditioner} | {damping:g} | {way} | {row} |", flush=True)


def compared(options: argparse.Namespace, preconditioner: str, damping: float) -> dict[str, str]:
    """Return the rest of each way's row: errors, and kept megabytes."""
    own = trainer(preconditioner=preconditioner, damping=damping)
    others = {
        way: trainer(
            preconditioner=replace(named_preconditioner(preconditioner), dtype=bases),
            damping=damping,
            estimator=mpikfac.Estimator(factor_dtype=averages),
        )
        for way, (averages, bases) in WAYS.items()
    }
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for step, (images, labels) in zip(range(options.steps), examples(options.data)):
        for other in others.values():
            other.model.load_state_dict(own.model.state_dict())
        for kfac in (own, *others.values()):
            kfac.optimizer.zero_grad()
            F.cross_entropy(kfac.model(images), labels).backward()
            kfac.step()
        if step >= options.steps - EVERY:
            for way, other in others.items():
                pairs = zip(inside.directions(other).values(), inside.directions(own).values())
                errors[way] += [error(ours, exact) for ours, exact in pairs]
    return {
        way: f"{statistics.median(errors[way]):.2%} | {max(errors[way]):.1%} | {kept(other)}"
        for way, other in others.items()
    }


def error(ours: Tensor, exact: Tensor) -> float:
    """Return the relative error."""
    return ((ours - exact).norm() / exact.norm()).item()


def trainer(**settings: Any) -> mpikfac.KFAC:
    """Return K-FAC on a ResNet-20, the same at each call."""
    torch.manual_seed(0)
    model = models.build("resnet20", 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mpikfac.KFAC(model, optimizer, mpikfac.world(), inv_update_steps=EVERY, **settings)


def examples(path: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Return batches of CIFAR-10, for one epoch."""
    images = datasets.load("cifar10", path, 10_000)
    normalise = batches.Normalise(images.train_images, torch.device("cpu"))
    draw = batches.Batches(
        images.train_images, images.train_labels, 64, seed=0, augment=Augmentation()
    )
    for step in itertools.count():
        x, labels = draw.get(0, step)
        yield normalise(x), labels


def kept(kfac: mpikfac.KFAC) -> str:
    """Return the megabytes of averages and of bases."""
    memory = kfac.plan.memory(0)
    return ", ".join(f"{memory[name] / 1e6:.1f}" for name in ("averages", "bases"))


if __name__ == "__main__":
    main()
