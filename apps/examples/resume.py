"""Write a checkpoint, and continue from it with a different number of ranks.

mpikfac launch -n 2 apps/examples/resume.py DIRECTORY    # steps 1 to 10
python apps/examples/resume.py DIRECTORY                 # continues with steps 11 to 20
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import mpikfac

STEPS = 10  # steps per run
BATCH = 32  # images per step, across all ranks


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step, which is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=generator)
    return inputs, inputs.cumsum(1).argmax(1)


def main(directory: str) -> None:
    """Load the newest checkpoint if there is one, train, and write a checkpoint."""
    comm = mpikfac.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    # Each factor has a single owner, so each rank stores and saves only its part of the state.
    trainer = mpikfac.KFACOptimizer(model, strategy="mem-opt").trainer

    checkpoint = mpikfac.find_checkpoint(comm, directory)  # the newest that is not damaged, or None
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)  # the model, the optimizer and K-FAC
    first = trainer.steps
    for step in range(first, first + STEPS):
        inputs, labels = (tensor.chunk(comm.size)[comm.rank] for tensor in batch(step))
        trainer.optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        trainer.step()
    mpikfac.save_checkpoint(comm, directory, trainer.state_dict(), trainer.steps)
    if comm.rank == 0:
        with torch.no_grad(), trainer.no_recording():
            inputs, labels = batch(-1)
            loss = F.cross_entropy(model(inputs), labels)
        print(f"steps {first + 1} to {trainer.steps}, {comm.size} rank(s): test loss {loss:.6f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("resume.py needs one argument, the checkpoint directory")
    main(sys.argv[1])
