"""Train from a loader whose workers start in the way of the argument; print the weights' sum.

A second argument lets the main program ask for MPI where a worker imports the program.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mpikfac import KFAC, KFACOptimizer, world  # noqa: F401 (as scripts import them)

if sys.argv[2:]:
    world()


class Rows(Dataset):
    """Rows of random numbers with labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=made), index % 3


def main() -> None:
    """Take four steps of two examples on each rank."""
    way = sys.argv[1]
    workers = {} if way == "none" else {"num_workers": 2, "multiprocessing_context": way}
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = KFACOptimizer(model)
    for x, y in DataLoader(Rows(), 2, **workers):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if world().rank == 0:
        print(world().size, model.weight.sum().item().hex(), flush=True)


if __name__ == "__main__":
    main()
