"""Measure the stages of a K-FAC step with new factors and bases: time, and the machine's floor.

    OMP_NUM_THREADS=1 mpirun -n 1 python -m mpi4py benchmarks/stages.py --model resnet20

The floor of a stage is the longer of two times, layer by layer: the time of the necessary
arithmetic at the best measured rate of a matrix product, and the time of the necessary bytes at the
measured bandwidth of a copy. The benchmark runs on the CPU. Seconds are medians over steps that
alternate with plain PyTorch SGD, of the slowest rank. Models are in channels-last format.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import mpikfac
from mpikfac_apps.problems import models

FLOAT = 4  # bytes
SGD, WHOLE, ADDED = "plain PyTorch SGD step", "K-FAC step", "all that SGD does not do"


class Work(NamedTuple):
    """Floating-point operations, and bytes read and written."""

    flops: float
    bytes: float


class Machine(NamedTuple):
    """Rates per second of a rank: operations in torch.mm, in oneDNN, and bytes copied."""

    mm: float
    onednn: float
    copied: float


def main() -> None:
    """Print a line for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=128, help="images per rank")
    parser.add_argument("--size", type=int, default=32, help="image height and width")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--preconditioner", default="inverse")
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.manual_seed(comm.rank)
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(10, (options.batch,))

    machine = measured_machine(comm)
    model, optimizer = fresh(options.model)
    kfac = mpikfac.KFAC(
        model,
        optimizer,
        comm,
        damping=0.03,
        inv_update_steps=1,
        preconditioner=options.preconditioner,
    )
    floors = floors_of(kfac, calls_of(model, kfac, images), machine)
    plain_model, plain_optimizer = fresh(options.model)
    sgd, whole, stages = [], [], []
    for _ in range(options.repetitions + 2):
        sgd.append(step(plain_model, plain_optimizer, plain_optimizer.step, images, labels)[0])
        comm.Barrier()
        kfac.trace.clear()
        total, finishing = step(model, optimizer, kfac.step, images, labels)
        whole.append(total)
        stages.append(by_stage(kfac.trace, finishing))
    seconds = {name: median(record[name] for record in stages[2:]) for name in stages[-1]}
    seconds |= {SGD: median(sgd[2:]), WHOLE: median(whole[2:])}
    slowest, floors = (highest(comm.gather(found)) for found in (seconds, floors))
    if comm.rank == 0:
        report(options, comm.size, machine, slowest, floors)


def fresh(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model and optimizer at every call."""
    torch.manual_seed(0)
    model = models.build(name, classes=10).to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    finish: Callable[[], None],
    images: Tensor,
    labels: Tensor,
) -> tuple[float, float]:
    """Return seconds of a training step that ends with `finish`, and seconds of `finish`."""
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    middle = time.perf_counter()
    finish()
    return time.perf_counter() - start, time.perf_counter() - middle


def by_stage(trace: mpikfac.Trace, finishing: float) -> dict[str, float]:
    """Return seconds of every stage of K-FAC, of the time between the stages, and in all."""
    seconds = dict(trace.seconds)
    backward = seconds["statistics"]
    seconds["outside stages"] = finishing - (sum(seconds.values()) - backward)
    del seconds["optimizer"]
    return seconds | {ADDED: sum(seconds.values())}


def highest(records: list[dict[str, float]] | None) -> dict[str, float]:
    """Return the largest value of each name over ranks; nothing without gathered values."""
    return {name: max(r[name] for r in records) for name in records[0]} if records else {}


# -- the machine -------------------------------------------------------------------------------


def measured_machine(comm: MPI.Intracomm) -> Machine:
    """Return rank 0's rates while all ranks work.

    Collective over: world.
    """
    mm = onednn = copied = 0.0
    for order in (512, 1024, 2048):
        a, b = torch.randn(2, order, order)
        mm = max(mm, 2 * order**3 / fastest(torch.mm, a, b))
        onednn = max(onednn, 2 * order**3 / fastest(F.linear, a.to_mkldnn(), b.to_mkldnn()))
    source, target = torch.randn(2, 2**24)
    copied = 2 * FLOAT * source.numel() / fastest(target.copy_, source)
    return comm.bcast(Machine(mm, onednn, copied))


def fastest(work: Callable[..., object], *arguments: Tensor) -> float:
    """Return seconds of the fastest of several runs."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def floor(parts: Iterable[Work], machine: Machine) -> float:
    """Return a lower bound of the seconds of the parts, one after another."""
    rate = max(machine.mm, machine.onednn)
    return sum(max(part.flops / rate, part.bytes / machine.copied) for part in parts)


# -- the work ----------------------------------------------------------------------------------


def input_factor(module: nn.Module, x: Tensor, positions: int) -> Work:
    """Return the work of the sum of `a a^T`: half of the symmetric products, one read of the input.

    With stride 1, the products depend on the difference of two offsets in the kernel: 25 for 3x3,
    not 81. Borders are left out.
    """
    order = module.weight[0].numel()
    pairs = order**2
    if isinstance(module, nn.Conv2d) and set(module.stride) == {1}:
        kh, kw = module.kernel_size
        pairs = (2 * kh - 1) * (2 * kw - 1) * module.in_channels**2
    return Work(pairs * positions, FLOAT * (x.numel() + order**2))


def output_factor(outputs: int, positions: int) -> Work:
    """Return the work of the sum of `g g^T`: half of the products; the gradient is read once."""
    return Work(outputs**2 * positions, FLOAT * (outputs * positions + outputs**2))


def decomposition(order: int, preconditioner: str) -> Work:
    """Return the work of eigenvectors, 4/3 n^3 to a tridiagonal matrix and 2 n^3 back, or Cholesky.

    Cholesky for an inverse is n^3. The tridiagonal problem is not counted: deflation can make the
    problem cheap.
    """
    return Work((10 / 3 if preconditioner == "eigen" else 1) * order**3, 2 * FLOAT * order**2)


def preconditioning(outputs: int, inputs: int, preconditioner: str) -> Work:
    """Return the work of products: with bases from both sides, there and back, or inverses once."""
    flops = 2 * outputs * inputs * (outputs + inputs) * (2 if preconditioner == "eigen" else 1)
    return Work(flops, FLOAT * (outputs**2 + inputs**2 + 2 * outputs * inputs))


def moved(numbers: int) -> Work:
    """Return the work of reading or writing numbers."""
    return Work(0, FLOAT * numbers)


def calls_of(
    model: nn.Module, kfac: mpikfac.KFAC, images: Tensor
) -> list[tuple[nn.Module, Tensor, int]]:
    """Return module, input and number of positions of each covered layer in a forward pass."""
    calls = []

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        calls.append((module, inputs[0], output.numel() // len(module.weight)))

    modules = [model.get_submodule(layer.name) for layer in kfac.plan.layers]
    hooks = [module.register_forward_hook(note) for module in modules]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return calls


def floors_of(
    kfac: mpikfac.KFAC, calls: list[tuple[nn.Module, Tensor, int]], machine: Machine
) -> dict[str, float]:
    """Return seconds of this rank's floor by stage."""
    plan, rank = kfac.plan, mpikfac.world().rank
    inputs = [input_factor(*call) for call in calls]
    outputs = [output_factor(len(module.weight), positions) for module, _, positions in calls]
    shapes = {layer.name: (layer.outputs, layer.inputs) for layer in plan.layers}
    sizes = {name: size // plan.itemsize for name, size in plan.memory(rank).items()}
    parts = {
        "input factors": inputs,
        "output factors": outputs,
        "statistics": inputs + outputs,
        "read gradients": [moved(2 * sizes["gradients"])],
        "decompose": [decomposition(f.order, plan.preconditioner) for f in plan.of(rank).owned],
        "precondition": [
            preconditioning(*shapes[layer.name], plan.preconditioner)
            for layer in plan.of(rank).preconditioned
        ],
        "write back": [moved(2 * sizes["directions"])],
        "outside stages": [moved(3 * sizes["averages"] + 2 * sizes["directions"])],
    }
    wire: Counter[str] = Counter()
    for message in plan.messages(rank, statistics=True, refresh=True):
        wire[message.stage] += message.wire
    parts |= {stage: [Work(0, count)] for stage, count in wire.items()}
    floors = {stage: floor(work, machine) for stage, work in parts.items()}
    details = floors["input factors"] + floors["output factors"]
    floors[ADDED] = sum(floors.values()) - details
    return floors


def report(
    options: argparse.Namespace,
    ranks: int,
    machine: Machine,
    seconds: dict[str, float],
    floors: dict[str, float],
) -> None:
    """Print milliseconds, fraction of SGD's step, floor, and the floor's fraction of the time."""
    print(
        f"{options.model}, {options.size}x{options.size}, batch {options.batch} per rank, {ranks} "
        f"ranks, {torch.get_num_threads()} thread(s) each; torch {torch.__version__}\n"
        f"torch.mm {machine.mm / 1e9:.0f} GFLOP/s, oneDNN {machine.onednn / 1e9:.0f} GFLOP/s, "
        f"copy {machine.copied / 1e9:.1f} GB/s\n"
        f"{'':26s} {'ms':>8s} {'of SGD':>8s} {'floor ms':>9s} {'reached':>8s}"
    )
    for stage, taken in seconds.items():
        line = f"{stage:26s} {taken * 1e3:8.1f} {taken / seconds[SGD]:8.1%}"
        if stage in floors:
            line += f" {floors[stage] * 1e3:9.1f} {floors[stage] / taken:8.1%}"
        print(line)
        if stage == "statistics":
            for part in ("input factors", "output factors"):
                print(f"  {part:42s} {floors[part] * 1e3:9.1f}")


if __name__ == "__main__":
    main()
