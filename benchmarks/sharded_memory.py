"""Measure the memory of ranks with whole weights, and with shards of them by `fully_shard`.

    OMP_NUM_THREADS=1 mpirun --oversubscribe -n 4 python -m mpi4py benchmarks/sharded_memory.py

Every kind trains a network of equal linear layers for four steps, of which the first and the last
have new factors and bases. torch's profiler reports every allocation of torch on the CPU from the
creation of the model on: "held" is their sum after the last step without gradients, and "peak" the
maximum of the sum during that step. Buffers of MPI and gloo outside torch are not counted.
"""

from __future__ import annotations

import argparse
import gc
import tempfile

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import mpikfac
from mpikfac.plan import AdamGrafting, memory_of_grafting

MIB = 2**20
LAST = "last step"
KINDS = {"whole": None, "whole, sharded-optimizer": "sharded-optimizer", "fully_shard": None}
"""The strategies by kind; None for the default one."""


def main() -> None:
    """Measure every kind; rank 0 prints the bytes of the rank that needs the most.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=384, help="of every layer")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    comm = mpikfac.world()
    meeting = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    place = f"file://{meeting}/ranks"
    distributed.init_process_group("gloo", place, rank=comm.rank, world_size=comm.size)
    for kind in KINDS:
        of_ranks = comm.gather(measured(kind, options.width, options.layers, comm))
        if comm.rank == 0:
            most = {name: max(rank[name] for rank in of_ranks) / MIB for name in of_ranks[0]}
            values = "".join(f"  {name} {value:6.2f}" for name, value in most.items())
            print(f"{comm.size} ranks  {kind:26s}{values}  MiB", flush=True)
    distributed.destroy_process_group()


def measured(kind: str, width: int, layers: int, comm: mpikfac.Comm) -> dict[str, int]:
    """Return the bytes of the rank: of weights, of the plan, after the last step, and in it.

    Collective over: world.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer = begun(kind, width, layers)
        model, plan = optimizer.trainer.model, optimizer.trainer.plan.of(comm.rank)
        for step in range(4):
            with record_function(LAST if step == 3 else "step"):
                inputs = torch.randn(8, width)
                F.mse_loss(model(inputs), inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
    planned = optimizer.trainer.plan.memory(comm.rank)
    planned |= memory_of_grafting(plan, AdamGrafting(momentum=0.9))
    weights = sum(map(bytes_of, model.parameters()))
    found = {"weights": weights, "plan": sum(planned.values())} | allocated(profiler)
    optimizer.trainer.close()
    del optimizer, model
    gc.collect()
    return found


def begun(kind: str, width: int, layers: int) -> mpikfac.KFACOptimizer:
    """Return the optimizer of a new model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if kind == "fully_shard":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    intervals = {"factor_update_steps": 3, "inv_update_steps": 3, "budget": None}
    return mpikfac.KFACOptimizer(model, strategy=KINDS[kind], **intervals)


def bytes_of(parameter: torch.Tensor) -> int:
    """Return the bytes that this rank holds of a parameter."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() * local.element_size()


def allocated(profiler: profile) -> dict[str, int]:
    """Return the bytes of torch's tensors after the last step, and their maximum in it."""
    events = profiler.profiler.kineto_results.events()
    (last,) = (event for event in events if event.name() == LAST)
    start, end, held, peak = last.start_ns(), last.end_ns(), 0, 0
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if event.start_ns() > end:
            break
        held += event.nbytes()
        peak = max(peak, held) if event.start_ns() > start else 0
    return {"held": held, "peak": peak}


if __name__ == "__main__":
    main()
