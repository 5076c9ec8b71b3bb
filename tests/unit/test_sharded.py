"""Models whose parameters are sharded over processes in ways that no trainer supports."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import mpikfac
import mpikfac.lab
from mpikfac import BFloat16, Compression, Estimator, MemOpt, Strategy, Transport
from mpikfac.errors import UserError

OWNERS = MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)


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


def placed(mesh, **options):
    """Return a model in FSDP2 with options of `fully_shard`."""
    return fully_shard(network(), mesh=mesh, **options)


def by_columns(mesh):
    """Return a model whose weights are sharded by columns."""
    return placed(mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


def unsharded(mesh):
    """Return a model in FSDP2 that has whole weights after a pass without gradients."""
    model = placed(mesh)
    with torch.no_grad():
        model(torch.ones(2, 3))
    return model


def divided(mesh):
    """Return a model in FSDP2 whose gradients are sums."""
    model = placed(mesh)
    model.set_gradient_divide_factor(1.0)
    return model


PLAIN = "use the plain model"
SHARDED = {
    "FSDP2, a layer": (by_layer, "1.weight is not sharded, but .*: call fully_shard"),
    "FSDP2, whole weights": (unsharded, "0.weight is not sharded, .*; .* call model.reshard"),
    "FSDP2, columns": (by_columns, "0.weight has the placements S(1) on .*; K-FAC needs shards"),
    "FSDP2, sums": (divided, "set_gradient_divide_factor(1) must not be called"),
    "FSDP1": (fsdp1, f"the model is wrapped in FullyShardedDataParallel; {PLAIN}"),
    "FSDP1, original parameters": (
        lambda mesh: fsdp1(mesh, use_orig_params=True),
        f"the model is wrapped in FullyShardedDataParallel; {PLAIN}",
    ),
    "FSDP1, inside": (
        lambda mesh: nn.Sequential(nn.Linear(3, 3), fsdp1(mesh)),
        f"1 is wrapped in FullyShardedDataParallel; {PLAIN}",
    ),
    "tensor parallel": (
        lambda mesh: parallelize_module(network(), mesh, {"1": ColwiseParallel()}),
        "1.weight is a DTensor, but fully_shard was not called .*, or use the plain model",
    ),
    "ZeRO-3": (zero3, f"1.weight is partitioned by DeepSpeed's ZeRO-3; {PLAIN}"),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_models_are_refused(mesh, name):
    """Oracle: torch's own classes, sharded over one process; and DeepSpeed's attribute."""
    make, line = SHARDED[name]
    line = line.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises((ValueError, UserError), match=line):
        mpikfac.KFAC(model := make(mesh), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("rows", [3, 5])
def test_shards_of_a_wrong_size_are_refused(mesh, rows):
    """Oracle: a single process, which must have all of the 4 rows."""
    model = placed(mesh)
    shape = {"shape": torch.Size([4, 3]), "stride": (3, 1)}
    part = DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], run_check=False, **shape)
    model[0].weight = nn.Parameter(part)
    sizes = f"0.weight has {3 * rows} elements on this rank, but must have 12"
    with pytest.raises(UserError, match=sizes):
        mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_residuals_need_whole_parameters(mesh):
    """Oracle: the line with the remedy."""
    term = mpikfac.lab.Term(lambda model, x: model(x), torch.ones(2, 3))
    with pytest.raises(ValueError, match="sharded by fully_shard, .*; use the plain model"):
        mpikfac.lab.SampleSpace(placed(mesh), [term])


CHOICES = {
    "comm-opt": ({"strategy": "comm-opt"}, "assignment.shard_optimizer=True, not False"),
    "robust": ({"strategy": "median"}, "assignment.shard_optimizer=True, not False"),
    "replicas": ({"strategy": "diloco"}, "assignment.shard_optimizer=True, not False"),
    "parts": (
        {"strategy": Strategy(transport=Transport(virtual_ranks=2))},
        "assignment.shard_optimizer=True, not False",
    ),
    "overlap": (
        {"strategy": Strategy(OWNERS, transport=Transport(overlap=True))},
        "transport.overlap=False, not True",
    ),
    "nodes": (
        {"strategy": Strategy(OWNERS, transport=Transport(ranks_per_node=1))},
        "transport.ranks_per_node=None, not 1",
    ),
    "encoded": (
        {"strategy": Strategy(OWNERS, compression=Compression(gradients=BFloat16()))},
        "compression.gradients=None, not 'bfloat16'",
    ),
    "sampled labels": (
        {"estimator": Estimator(fisher_type="mc")},
        "fisher_type='empirical' or 'forward-only', not 'mc'",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_need_whole_weights_are_refused(mesh, name):
    """Oracle: the choice that the message names."""
    settings, needs = CHOICES[name]
    with pytest.raises(ValueError, match=f"fully_shard=True.* needs {needs}"):
        mpikfac.KFACOptimizer(placed(mesh), **settings)


def test_arguments_that_need_whole_gradients_are_refused(mesh):
    """Oracle: the arguments that the messages name; a step without them follows."""
    model = placed(mesh)
    kfac = mpikfac.KFACOptimizer(model).trainer
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="examples=2 needs whole gradients"):
        kfac.step(examples=2)
    with pytest.raises(ValueError, match="fully_shard averages gradients before .* unscaled"):
        kfac.step(torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"precondition|call step\(\)"):
        kfac.precondition()
    kfac.step()
    assert kfac.steps == 1


def test_gradients_that_are_no_means_are_refused(mesh):
    """Oracle: the calls that the messages name; a step without them follows."""
    model = placed(mesh)
    kfac = mpikfac.KFACOptimizer(model).trainer
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(
        ValueError, match=r"set_requires_gradient_sync\(True\) before the last pass"
    ):
        kfac.step()
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(2.0)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"set_gradient_divide_factor\(2\) must not be called"):
        kfac.step()


def test_a_model_is_sharded_before_its_trainer_is_created(mesh):
    """Oracle: the line that names the order."""
    model = network()
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UserError, match="fully_shard must be called before the trainer is created"):
        kfac.step()
