"""Train six steps, and print the library's folder and the weights of rank 0: core.py [DIRECTORY].

With DIRECTORY, the training stops after three steps with a checkpoint, and a new trainer goes on.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer, MemOpt, Strategy, Transport

COMM = mpikfac.world()
RUNS: dict[str, tuple[Any, Strategy | None]] = {
    "K-FAC by default": (mpikfac.KFAC, None),
    "K-FAC, overlapped": (
        mpikfac.KFAC,
        Strategy(MemOpt(), transport=Transport(fusion=1, overlap=True)),
    ),
    "K-FAC, late, owners step": (
        mpikfac.KFAC,
        Strategy(
            MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True),
            transport=Transport(reduce_factors_at="inverses"),
        ),
    ),
    "first-order by default": (FirstOrderTrainer, None),
    "first-order, owners step": (
        FirstOrderTrainer,
        Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
    ),
}


def begun(kind: Any, strategy: Strategy | None) -> Any:
    """Return a trainer of a new model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return kind(model, optimizer, COMM, strategy)


def train(trainer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1 + step * COMM.size + COMM.rank)
        images, labels = torch.randn(6, 2, 4, 4), torch.randint(3, (6,))
        trainer.optimizer.zero_grad()
        nn.functional.cross_entropy(trainer.model(images), labels).backward()
        trainer.step()


def resumed(trainer: Any, root: Path, run: tuple[Any, Strategy | None]) -> Any:
    """Save the state of a trainer, and return a new trainer with the state."""
    path = mpikfac.save_checkpoint(COMM, root, trainer.state_dict(), trainer.steps)
    trainer.close()
    after = begun(*run)
    after.load_state_dict(mpikfac.load_checkpoint(COMM, path))
    return after


def main() -> None:
    if COMM.rank == 0:
        print(Path(mpikfac.__file__).parent)
    for name, run in RUNS.items():
        trainer = begun(*run)
        train(trainer, range(3))
        if sys.argv[1:]:
            trainer = resumed(trainer, Path(sys.argv[1]) / name, run)
        else:
            trainer.state_dict()  # moves late averages to their owners, as a checkpoint does
        train(trainer, range(3, 6))
        digest = hashlib.sha256()
        for value in trainer.model.state_dict().values():
            digest.update(value.numpy().tobytes())
        trainer.close()
        if COMM.rank == 0:
            print(f"{name}: {digest.hexdigest()}")


if __name__ == "__main__":
    main()
