"""Compare strategies, which send different messages but compute the same weights up to rounding.

Compression is the exception: it changes the values that are sent.

mpikfac launch -n 2 apps/examples/strategies.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import mpikfac
from mpikfac import CommOpt, Compression, Int8, MemOpt, Strategy, Transport

STRATEGIES = {
    "comm-opt": Strategy(CommOpt()),
    "mem-opt": Strategy(MemOpt()),
    "mem-opt, sharded optimizer": Strategy(MemOpt(shard_optimizer=True)),
    "comm-opt, overlapped": Strategy(transport=Transport(overlap=True)),
    "comm-opt, 8-bit gradients": Strategy(compression=Compression(gradients=Int8())),
}
STEPS = 20


def train(strategy: Strategy) -> tuple[torch.Tensor, float]:
    """Return the weights after training, and the KB per step that this rank passed to MPI."""
    comm = mpikfac.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    trace = mpikfac.Trace()
    optimizer = mpikfac.KFACOptimizer(model, strategy=strategy, trace=trace)
    inputs = torch.randn(64, 64)
    labels = inputs[:, :10].argmax(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        shard = slice(comm.rank, None, comm.size)
        F.cross_entropy(model(inputs[shard]), labels[shard]).backward()
        optimizer.step()
    optimizer.trainer.close()
    return nn.utils.parameters_to_vector(model.parameters()), sum(trace.sent.values()) / STEPS / 1e3


def main() -> None:
    """Train with each strategy, and print the differences."""
    comm = mpikfac.world()
    expected, _ = train(STRATEGIES["comm-opt"])
    for name, strategy in STRATEGIES.items():
        weights, sent = train(strategy)
        error = (weights - expected).norm() / expected.norm()
        if comm.rank == 0:
            print(f"{name:<28} {sent:8.1f} KB per step, relative difference {error:.0e}")


if __name__ == "__main__":
    main()
