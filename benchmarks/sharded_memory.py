"""Measure the memory of the ranks of a whole model and of one under `fully_shard`.

    OMP_NUM_THREADS=1 python benchmarks/sharded_memory.py

Every job trains a network of equal linear layers for four steps, the last of which has new factors
and bases. torch's profiler reports every allocation of torch on the CPU, from the creation of the
model on: "held" is their sum after the last step, when the gradients are dropped, and "peak" its
maximum since the end of the third step. Buffers of MPI and of gloo outside torch are not counted.
MPIRUN and MPIRUN_FLAGS set the launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import mpikfac
from mpikfac.plan import memory_of_grafting

MIB = 2**20
LAST = "last step"
KINDS = ("whole", "whole, sharded-optimizer", "fully_shard")


def main() -> None:
    """Run every kind on 1, 2 and 4 ranks and print a table, or run a single named kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=768, help="of every layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--kind", choices=KINDS, help="measure this one, in the present job")
    options = parser.parse_args()
    if options.kind:
        measure(options)
        return
    weights = options.layers * options.width**2 * 4 / MIB
    print(f"weights {weights:.1f} MiB; torch {torch.__version__}; MiB of the fullest rank")
    for ranks in options.ranks:
        for kind in KINDS:
            found = run(kind, ranks)
            most = {name: max(rank[name] for rank in found) / MIB for name in found[0]}
            values = "  ".join(f"{name} {value:7.1f}" for name, value in most.items())
            print(f"{ranks} ranks  {kind:26s}{values}", flush=True)


def run(kind: str, ranks: int) -> list[dict[str, int]]:
    """Return the bytes of every rank of a job of the kind."""
    launcher = [os.environ.get("MPIRUN", "mpirun"), *os.environ.get("MPIRUN_FLAGS", "").split()]
    program = [sys.executable, "-m", "mpi4py", __file__, *sys.argv[1:], "--kind", kind]
    job = subprocess.run(
        [*launcher, "-n", str(ranks), *program], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(job.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> None:
    """Train a kind; rank 0 prints the bytes of all ranks.

    Collective over: world.
    """
    comm = mpikfac.world()
    meeting = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    distributed.init_process_group(
        "gloo", f"file://{meeting}/ranks", rank=comm.rank, world_size=comm.size
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer = begun(options)
        for step in range(4):
            with record_function(LAST if step == 3 else "step"):
                inputs = torch.randn(8, options.width)
                optimizer.zero_grad()
                F.mse_loss(optimizer.trainer.model(inputs), inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
                del inputs
    plan, trainer = optimizer.trainer.plan, optimizer.trainer
    planned = plan.memory(comm.rank) | memory_of_grafting(
        plan.of(comm.rank), mpikfac.AdamGrafting(momentum=0.9)
    )
    weights = sum(of_rank(parameter) for parameter in trainer.model.parameters())
    found = {"weights": weights, "planned": sum(planned.values())} | allocated(profiler)
    everyone = comm.gather(found)
    if comm.rank == 0:
        print(json.dumps(everyone))
    distributed.destroy_process_group()


def begun(options: argparse.Namespace) -> mpikfac.KFACOptimizer:
    """Return the optimizer of a new model."""
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Linear(width, width, bias=False) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    settings = {"factor_update_steps": 3, "inv_update_steps": 3, "budget": None}
    if options.kind == "fully_shard":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    strategy = None if options.kind == "whole" else "sharded-optimizer"
    return mpikfac.KFACOptimizer(model, strategy=strategy, **settings)


def of_rank(parameter: torch.Tensor) -> int:
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
        if event.start_ns() >= start:
            peak = max(peak, held)
        held += event.nbytes()
    return {"held": held, "peak": max(peak, held)}


if __name__ == "__main__":
    main()
