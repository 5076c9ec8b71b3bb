"""Support models whose parameters `fully_shard` has sharded; reject other sharded models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed, nn

from mpikfac.comm import Comm, together
from mpikfac.errors import RanksDifferError
from mpikfac.layers import Layer, Other
from mpikfac.model.equality import sums_of_bits
from mpikfac.numerics import is_sharded, local
from mpikfac.plan import Sharding, shard_sizes

FSDP1, FSDP2, REPLICATE = "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"
PLAIN = "the plain model, which `mpirun` or `mpikfac launch` replicates, or fully_shard"


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` has sharded."""
    return [module for module in model.modules() if _is_a(module, FSDP2)]


def sharding_of(model: nn.Module, blocks: Sequence[Layer | Other], comm: Comm) -> Sharding:
    """Return the shards of all trained parameters, in the order of the blocks.

    Collective over: comm if `fully_shard` has sharded the model, otherwise none.

    Raises:
        UserError: on any rank, shards are not rows, some parameters are not sharded, or the shards
            of all ranks do not form the whole parameter.
    """
    if not fully_sharded(model):
        return Sharding()
    with together(comm, "fully_shard"):
        for module in fully_sharded(model):
            check_averaged(module)
        for name, parameter in model.named_parameters():
            _check_placed(name, parameter, comm)
    trained = [(block.name, parameter) for block in blocks for parameter in block.parameters]
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trained]
    return Sharding.of(shapes, comm.size, comm.size // shards_of(trained[0][1]))


def shards_of(parameter: Any) -> int:
    """Return the number of a parameter's shards: the size of its mesh's last dimension."""
    mesh = parameter.device_mesh
    return int(mesh.size(mesh.ndim - 1))


def check_wrappers(model: nn.Module) -> None:
    """Check that nothing but `fully_shard` shards the model.

    Raises:
        ValueError: a module is wrapped in FSDP1 or torch's `replicate`, or a parameter is
            partitioned by DeepSpeed or sharded by one of torch's tensor-parallel plans.
    """
    for name, module in model.named_modules():
        for wrapper in (FSDP1, REPLICATE):
            if _is_a(module, wrapper):
                raise ValueError(f"{name or 'the model'} is wrapped in {wrapper}; use {PLAIN}")
    by_torch = bool(fully_sharded(model))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"{name} is partitioned by DeepSpeed's ZeRO-3; use {PLAIN}")
        if is_sharded(parameter) and not by_torch:
            raise ValueError(
                f"{name} is a DTensor, but fully_shard was not called on a module of this model; "
                f"pass the whole sharded model, or use {PLAIN}"
            )


def check_replicas(comm: Comm, model: nn.Module, sharding: Sharding) -> None:
    """Check that ranks with the same rows of a parameter have the same values.

    Collective over: comm if there are replicas, otherwise none.

    Raises:
        RanksDifferError: replicas differ; the message names the first parameter that does.
    """
    shards = sharding.shards
    if not sharding or shards == comm.size:
        return
    rows = {name: local(p.detach()) for name, p in model.named_parameters() if is_sharded(p)}
    sums = comm.allgather(sums_of_bits(rows))
    for rank, of_rank in enumerate(sums):
        for name, value in of_rank.items():
            if value != sums[rank % shards][name]:
                raise RanksDifferError(
                    f"parameter {name!r} has different values on rank {rank} and its replica on "
                    f"rank {rank % shards}; create the model with the same seed on all ranks"
                )


def _check_placed(name: str, parameter: Any, comm: Comm) -> None:
    """Check that the trainer's ranks hold a parameter's rows in rank order.

    Raises:
        ValueError: a trained parameter is not sharded, or the parameter is sharded in another way.
    """
    if not is_sharded(parameter):
        if parameter.requires_grad:
            raise ValueError(
                f"{name} is not sharded, but other parameters are: call fully_shard(model) after "
                f"sharding its parts, without ignored_params; after a forward pass without a "
                f"backward pass, call model.reshard() before creating the optimizer and trainer"
            )
        return
    mesh, placements = parameter.device_mesh, [str(each) for each in parameter.placements]
    if placements not in (["S(0)"], ["R", "S(0)"]):
        raise ValueError(
            f"{name} has the placements {', '.join(placements)} on a mesh {tuple(mesh.shape)}; "
            f"K-FAC needs shards that are rows, or replicas of such shards: tensor parallelism and "
            f"shard_placement_fn are not supported"
        )
    members = mesh.mesh.flatten().tolist()
    if (len(members), members.index(distributed.get_rank())) != (comm.size, comm.rank):
        raise ValueError(
            f"{name} is sharded over the processes {members}, but K-FAC runs on {comm.size} ranks, "
            f"of which this is rank {comm.rank}; pass comm=mpikfac.over(group), with a group of "
            f"the processes of the mesh, which must be in ascending order"
        )
    shards = shards_of(parameter)
    elements = shard_sizes(tuple(parameter.shape), shards)[comm.rank % shards]
    if local(parameter).numel() != elements:
        raise ValueError(
            f"{name} has {local(parameter).numel()} elements on this rank, but must have "
            f"{elements}, as produced by torch.chunk"
        )
    if parameter.device.type != mesh.device_type:
        raise ValueError(
            f"{name} is on {parameter.device}, but must be on {mesh.device_type}, like its mesh; "
            f"do not use CPU offload"
        )


def check_averaged(module: Any) -> None:
    """Check that backward passes average a module's gradients over all ranks.

    Raises:
        ValueError: the program has set a divisor for the gradients, or turned off their reduction.
    """
    for group in _groups_of(module):
        if (factor := getattr(group, "gradient_divide_factor", None)) is not None:
            raise ValueError(
                f"set_gradient_divide_factor({factor:g}) must not be called: K-FAC needs the mean "
                f"of the ranks' gradients, which is the default"
            )
        if not (getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True)):
            raise ValueError(
                "step() must follow a pass that averages the gradients: call "
                "set_requires_gradient_sync(True) before the last pass of a batch"
            )


def _groups_of(module: Any) -> Sequence[Any]:
    """Return the groups of parameters that torch gathers together, from its private attributes."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def _is_a(module: nn.Module, name: str) -> bool:
    # Compare names, because importing the class takes longer than importing this whole library.
    return any(kind.__name__ == name for kind in type(module).__mro__)
