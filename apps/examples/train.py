"""Train a small network on handwritten digits with K-FAC, on any number of ranks.

python apps/examples/train.py
mpikfac launch -n 2 apps/examples/train.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpikfac
from mpikfac_apps.problems.datasets import digits

EPOCHS = 4
BATCH = 64  # images per step, across all ranks


def main() -> None:
    """Train, and print the test accuracy after each epoch."""
    comm = mpikfac.world()
    data = digits()
    train = TensorDataset(data.train_images / data.white, data.train_labels)
    # Each rank reads its own shard, and all ranks take the same number of steps.
    sampler = DistributedSampler(train, num_replicas=comm.size, rank=comm.rank, drop_last=True)
    loader = DataLoader(train, BATCH // comm.size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = mpikfac.KFACOptimizer(model)
    steps = EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()  # averages the gradients over all ranks, so all take the same step
            scheduler.step()
        if comm.rank == 0:  # all ranks have the same weights
            with torch.no_grad(), optimizer.trainer.no_recording():
                predicted = model(data.test_images / data.white).argmax(1)
            accuracy = (predicted == data.test_labels).float().mean()
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
