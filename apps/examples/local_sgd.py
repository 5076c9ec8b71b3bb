"""Train replicas of a model that average their weights every few steps (local SGD).

mpikfac launch -n 2 apps/examples/local_sgd.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import mpikfac
from mpikfac.lab import LocalSGD

STEPS = 64
BATCH = 16  # examples per rank and step


def main() -> None:
    """Train with several intervals between exchanges, and print the test losses."""
    for sync_every in (2, 8, 32):
        loss, sent = train(mpikfac.Strategy(sync=LocalSGD(sync_every=sync_every)))
        if mpikfac.world().rank == 0:
            print(f"sync_every={sync_every:<3} {sent:6.1f} KB per step, test loss {loss:.3f}")


def train(strategy: mpikfac.Strategy) -> tuple[float, float]:
    """Return the test loss of the averaged model, and the KB per step that a rank passed to MPI."""
    comm = mpikfac.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = mpikfac.Trace()
    trainer = mpikfac.FirstOrderTrainer(model, inner, comm, strategy, trace=trace)
    shard = torch.Generator().manual_seed(1 + comm.rank)  # each rank draws its own examples
    for _ in range(STEPS):
        inner.zero_grad()
        loss_of(model, shard).backward()
        trainer.step()
    trainer.average_replicas()  # from here on, all ranks have the same model
    with torch.no_grad():
        loss = loss_of(model, torch.Generator().manual_seed(0), examples=512).item()
    trainer.close()
    return loss, sum(trace.sent.values()) / STEPS / 1e3


def loss_of(model: nn.Module, generator: torch.Generator, examples: int = BATCH) -> torch.Tensor:
    """Return the mean loss on new examples."""
    inputs = torch.randn(examples, 16, generator=generator)
    return F.cross_entropy(model(inputs), inputs.cumsum(1).argmax(1))


if __name__ == "__main__":
    main()
