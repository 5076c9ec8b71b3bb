"""Gradients are compared with the module's calls unless another library has averaged them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import KFAC
from support import problem

RANKS = mpikfac.world().size
pytestmark = pytest.mark.skipif(
    RANKS == 1 or problem.DEVICE.type != "cpu", reason="needs two ranks of gloo"
)


# So `.grad` is divided and averaged while the backward pass runs.
ddp = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)


@pytest.fixture
def gloo(comm, tmp_path):
    """Let torch.distributed join the processes, too."""
    store = f"file://{comm.bcast(str(tmp_path))}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=comm.rank, world_size=comm.size
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("wrapped", ["no", "model", "part", "whole"])
def test_only_own_gradients_are_compared(comm, wrapped, penalised, caplog):
    """Oracle: the log. Averages of DDP differ from the rank's own gradients, without a penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    run, first = model, model[0]
    if wrapped == "model":
        run = model = ddp(model)
    elif wrapped == "part":
        run = ddp(model)
    elif wrapped == "whole":
        whole = nn.Sequential(model, nn.Linear(3, 3).requires_grad_(False))
        run = ddp(whole)
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), comm)
    made = torch.Generator().manual_seed(comm.rank)
    for _ in range(2):
        x = torch.randn(4, 1, 6, 6, generator=made) * (1 + 5 * comm.rank)
        kfac.optimizer.zero_grad()
        loss = F.cross_entropy(run(x), torch.arange(4) % 3)
        (loss + penalised * 5 * first.weight.square().sum()).backward()
        kfac.step()
    told = [
        r.getMessage()
        for r in caplog.records
        if "differs from the one computed from the module's calls" in r.msg
    ]
    expected = penalised and wrapped == "no" and comm.rank == 0
    assert len(told) == expected and all(line.startswith("layer '0'") for line in told)
