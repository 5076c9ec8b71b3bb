"""Models whose parameters are sharded over ranks by `fully_shard`; others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from mpikfac.comm import Comm
from mpikfac.layers import Layer, Other
from mpikfac.numerics import is_sharded, local
from mpikfac.plan import ShardedParameter, Sharding

FSDP1, FSDP2 = "FullyShardedDataParallel", "FSDPModule"
PLAIN = "the plain model, which `mpirun` or `mpikfac launch` replicates, or fully_shard"


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` has sharded."""
    return [module for module in model.modules() if _is_a(module, FSDP2)]


def sharding_of(model: nn.Module, blocks: Sequence[Layer | Other], comm: Comm) -> Sharding:
    """Return the shards of all trained parameters, in the order of the blocks.

    Raises:
        ValueError: shards are not rows, the shards of all ranks are not a whole, or some parameters
            are not sharded.
    """
    if not fully_sharded(model):
        return Sharding()
    for module in fully_sharded(model):
        _check_factor(module)
    for name, parameter in model.named_parameters():
        _check_placed(name, parameter, comm)
    trained = [(block.name, parameter) for block in blocks for parameter in block.parameters]
    planned = tuple(ShardedParameter(name, elements_of(p)) for name, p in trained)
    return Sharding(planned, shards_of(trained[0][1]))


def shards_of(parameter: Any) -> int:
    """Return the number of shards: the size of the last dimension of the mesh."""
    mesh = parameter.device_mesh
    return int(mesh.size(mesh.ndim - 1))


def elements_of(parameter: Any) -> tuple[int, ...]:
    """Return the number of elements of every rank's shard: rows are distributed as by `chunk`."""
    shards = shards_of(parameter)
    chunks = torch.empty(parameter.shape, device="meta").chunk(shards)
    counts = [chunk.numel() for chunk in chunks]
    return (*counts, *[0] * (shards - len(counts))) * (parameter.device_mesh.size() // shards)


def check_wrappers(model: nn.Module) -> None:
    """Check that nothing but `fully_shard` shards the model.

    Raises:
        ValueError: a module is in FSDP1, or a parameter is partitioned by DeepSpeed or sharded by a
            tensor-parallel plan of torch.
    """
    for name, module in model.named_modules():
        if _is_a(module, FSDP1):
            raise ValueError(f"{name or 'the model'} is wrapped in {FSDP1}; use {PLAIN}")
    by_torch = bool(fully_sharded(model))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"{name} is partitioned by DeepSpeed's ZeRO-3; use {PLAIN}")
        if is_sharded(parameter) and not by_torch:
            raise ValueError(f"{name} is a DTensor that fully_shard has not created; use {PLAIN}")


def _check_placed(name: str, parameter: Any, comm: Comm) -> None:
    """Check that the ranks of the trainer hold the rows of a parameter in their order.

    Raises:
        ValueError: they do not.
    """
    if not is_sharded(parameter):
        if parameter.requires_grad:
            raise ValueError(
                f"{name} is whole, but other parameters are sharded: call fully_shard(model), also "
                f"after its parts, without ignored_params; after a forward pass without a backward "
                f"pass, call model.reshard() before creating optimizer and trainer"
            )
        return
    mesh, placements = parameter.device_mesh, [str(each) for each in parameter.placements]
    if placements not in (["S(0)"], ["R", "S(0)"]):
        raise ValueError(
            f"{name} has the placements {', '.join(placements)} on a mesh {tuple(mesh.shape)}; "
            f"K-FAC needs rows as shards, or replicas of these: tensor parallelism and "
            f"shard_placement_fn are not supported"
        )
    members = mesh.mesh.flatten().tolist()
    if (len(members), members.index(distributed.get_rank())) != (comm.size, comm.rank):
        raise ValueError(
            f"{name} is sharded over the processes {members}, but K-FAC runs on {comm.size} ranks, "
            f"of which this is rank {comm.rank}; pass comm=mpikfac.over(mesh.get_group()), with "
            f"the processes of the mesh in ascending order"
        )
    elements = elements_of(parameter)[comm.rank]
    if local(parameter).numel() != elements:
        raise ValueError(
            f"{name} has {local(parameter).numel()} elements on this rank, and must have "
            f"{elements}, as after torch.chunk"
        )
    if parameter.device.type != mesh.device_type:
        raise ValueError(
            f"{name} is on {parameter.device}, and must be on {mesh.device_type}, as its mesh; do "
            f"not use CPU offload"
        )


def _check_factor(module: Any) -> None:
    """Check that gradients of a module become means over ranks.

    Raises:
        ValueError: the program has set another divisor.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    for group in getattr(state, "_fsdp_param_groups", ()):
        if (factor := getattr(group, "gradient_divide_factor", None)) is not None:
            raise ValueError(
                f"set_gradient_divide_factor({factor:g}) must not be called: K-FAC needs the mean "
                f"of the ranks' gradients, which is the default"
            )


def _is_a(module: nn.Module, name: str) -> bool:
    # Compare names, because importing the class takes longer than importing this whole library.
    return any(kind.__name__ == name for kind in type(module).__mro__)
