"""GPUs give the same numbers as CPUs, device buffers going to MPI directly or through the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")

STEPS, BATCH = 3, 12


def trained(comm, device: torch.device, strategy: mpikfac.Strategy) -> torch.Tensor:
    """Weights after a few steps on `device`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 9, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(9, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    model = model.double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, basis_every=2)
    mine = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for _ in range(STEPS):
        images, labels = torch.randn(BATCH, 2, 8, 8).double(), torch.randint(5, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine].to(device)), labels[mine].to(device)).backward()
        kfac.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


@pytest.mark.parametrize("aware", [None, "0"], ids=["as asked", "staged"])
@pytest.mark.parametrize("update", ["everyone", "owner"])
@pytest.mark.parametrize("reduction", ["everyone", "owners"])
def test_equals_cpu(comm, monkeypatch, reduction: str, update: str, aware: str | None) -> None:
    """Oracle: the same job on the CPU."""
    if aware is not None:
        monkeypatch.setenv("MPIKFAC_CUDA_AWARE", aware)
    for workers in mpikfac.divisors(comm.size):
        strategy = mpikfac.Strategy(workers, reduction, update)
        expected = trained(comm, torch.device("cpu"), strategy)
        found = trained(comm, mpikfac.device(comm, "cuda"), strategy)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
