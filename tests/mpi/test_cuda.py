"""GPUs give the same results as CPUs, whether MPI takes device buffers or copies on the host."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import BFloat16, CommOpt, Compression, Int8, Refresh, Strategy
from mpikfac.lab import PowerSGD, TopK
from support import problem
from support.strategies import assigned

pytestmark = [
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no GPU"),
    pytest.mark.usefixtures("made_on_the_host"),
]

STEPS, BATCH = 3, 12
REDUCTIONS = ("allreduce", "reduce_scatter")


def trainer(comm, device: torch.device, strategy: mpikfac.Strategy, **settings) -> mpikfac.KFAC:
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
    return problem.kfac(model, optimizer, comm, strategy, inv_update_steps=2, **settings)


def train(comm, kfac: mpikfac.KFAC, device: torch.device, steps: int = STEPS) -> torch.Tensor:
    """Return the weights after a few steps on `device`."""
    mine = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 2, 8, 8, generator=generator).double()
        labels = torch.randint(5, (BATCH,), generator=generator)
        kfac.optimizer.zero_grad()
        F.cross_entropy(kfac.model(images[mine].to(device)), labels[mine].to(device)).backward()
        kfac.step()
    return nn.utils.parameters_to_vector(kfac.model.parameters()).detach().cpu()


@pytest.mark.parametrize("aware", [None, "0"], ids=["as asked", "staged"])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_cpu(comm, monkeypatch, reduction: str, shards: bool, aware: str | None) -> None:
    """Oracle: the same job on the CPU."""
    if aware is not None:
        monkeypatch.setenv("MPIKFAC_CUDA_AWARE", aware)
    cpu, cuda = torch.device("cpu"), mpikfac.device(comm, "cuda")
    for workers, preconditioner, delay in itertools.product(
        mpikfac.plan.divisors(comm.size), ("inverse", "eigen"), (0, 1)
    ):
        placed = assigned(workers, comm.size, factor_reduction=reduction, shard_optimizer=shards)
        strategy = Strategy(placed, refresh=Refresh(staleness=delay))
        settings = {"preconditioner": preconditioner}
        expected = train(comm, trainer(comm, cpu, strategy, **settings), cpu)
        found = train(comm, trainer(comm, cuda, strategy, **settings), cuda)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("aware", [None, "0"], ids=["as asked", "staged"])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("wire", [BFloat16(), Int8(), TopK(ratio=0.1), PowerSGD()], ids=str)
def test_wires_equal_those_of_the_cpu(comm, monkeypatch, wire, shards, aware) -> None:
    """Oracle: the same job on the CPU; differences are too small to change the rounding."""
    if aware is not None:
        monkeypatch.setenv("MPIKFAC_CUDA_AWARE", aware)
    cpu, cuda = torch.device("cpu"), mpikfac.device(comm, "cuda")
    others = wire if isinstance(wire, BFloat16) else Int8()
    wires = Compression(factors=others, inverses=others, gradients=wire)
    for workers, reduction in itertools.product(mpikfac.plan.divisors(comm.size), REDUCTIONS):
        placed = assigned(workers, comm.size, factor_reduction=reduction, shard_optimizer=shards)
        strategy = Strategy(placed, compression=wires)
        expected = train(comm, trainer(comm, cpu, strategy), cpu)
        found = train(comm, trainer(comm, cuda, strategy), cuda)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("preconditioner", ["inverse", "eigen"])
def test_later_steps_allocate_no_device_memory(comm, preconditioner: str) -> None:
    """Oracle: the allocator's count of calls to the driver."""
    device = mpikfac.device(comm, "cuda")
    kfac = trainer(comm, device, Strategy(CommOpt()), preconditioner=preconditioner)
    train(comm, kfac, device, 4)
    before = torch.accelerator.memory_stats()["num_device_alloc"]
    train(comm, kfac, device, 4)
    assert torch.accelerator.memory_stats()["num_device_alloc"] == before
