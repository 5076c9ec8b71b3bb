"""Models whose parameters are sharded over processes are rejected before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import mpikfac


@pytest.fixture
def mesh():
    """Yield a mesh of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def network():
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def by_layer(mesh):
    """Return a model whose first layer alone is sharded by FSDP2."""
    model = network()
    fully_shard(model[0], mesh=mesh)
    return model


def fsdp1(mesh, **options):
    """Return a model in FSDP1."""
    return FullyShardedDataParallel(
        network(), device_mesh=mesh, device_id=torch.device("cpu"), **options
    )


def zero3(_mesh):
    """Return a model whose weights have DeepSpeed's marks."""
    model = network()
    model[1].weight.ds_id = 3
    return model


SHARDED = {
    "FSDP2": (lambda mesh: fully_shard(network(), mesh=mesh), "0.weight is a DTensor"),
    "FSDP2, a layer": (by_layer, "0.weight is a DTensor"),
    "FSDP1": (fsdp1, "the model is wrapped in FullyShardedDataParallel"),
    "FSDP1, original parameters": (
        lambda mesh: fsdp1(mesh, use_orig_params=True),
        "the model is wrapped in FullyShardedDataParallel",
    ),
    "FSDP1, inside": (
        lambda mesh: nn.Sequential(nn.Linear(3, 3), fsdp1(mesh)),
        "1 is wrapped in FullyShardedDataParallel",
    ),
    "tensor parallel": (
        lambda mesh: parallelize_module(network(), mesh, {"1": ColwiseParallel()}),
        "1.weight is a DTensor",
    ),
    "ZeRO-3": (zero3, "1.weight is partitioned by DeepSpeed's ZeRO-3"),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_models_are_refused(mesh, name):
    """Oracle: torch's own classes, sharded over one process; and DeepSpeed's attribute."""
    make, line = SHARDED[name]
    with pytest.raises(ValueError, match=f"^{line}.*; use the plain model"):
        mpikfac.KFACOptimizer(make(mesh))
