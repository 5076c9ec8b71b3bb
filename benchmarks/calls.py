"""Count calls and changes of file inside the library in a step: the path of a reader.

    mpirun -n 4 python -m mpi4py benchmarks/calls.py [linear|conv] [inverse|eigen|eva] [--list]

Counts the Python functions of mpikfac, in all packages, that a training step with new factors and
bases enters, and the changes of file between consecutive functions. The step is the second one,
after everything is bound. The cost of an additional layer is the difference between models with 3
and 2 layers: on the rank that owns the layer, and the largest count on the other ranks.
"""

from __future__ import annotations

import collections
import inspect
import sys
import types
from pathlib import Path

import torch
from torch import nn

import mpikfac
from mpikfac import HybridOpt, Strategy

LIBRARY = Path(mpikfac.__file__).parent
LAYERS = {"linear": lambda: nn.Linear(8, 8), "conv": lambda: nn.Conv2d(8, 8, 3, padding=1)}

Call = tuple[str, str]


def main() -> None:
    """Print the counts on rank 0; with --list, also the functions of an additional layer."""
    words = [word for word in sys.argv[1:] if word[0] != "-"]
    kind, preconditioner = words + ["conv", "inverse"][len(words) :]
    comm = mpikfac.world()
    (one, _), (two, _), (three, owner) = (
        entered(kind, layers, preconditioner) for layers in (1, 2, 3)
    )
    mine = len(three) - len(two), changes(three) - changes(two)
    every = comm.gather(mine)
    more = comm.bcast(collections.Counter(three) - collections.Counter(two), root=owner)
    if comm.rank == 0:
        others = [found for rank, found in enumerate(every) if rank != owner] or [(0, 0)]
        told("one layer, all of the step", len(one), changes(one))
        told("every further layer, its owner", *every[owner])
        told("every further layer, other ranks", *map(max, zip(*others)))
        for (file, name), count in more.most_common() if "--list" in sys.argv else ():
            print(f"{count:4d} {file} {name}")


def told(what: str, calls: int, files: int) -> None:
    """Print a line of the table."""
    print(f"{what}: {calls} calls, {files} changes of file")


def entered(kind: str, layers: int, preconditioner: str) -> tuple[list[Call], int]:
    """Return file and name of all library functions of a step, and the last layer's owner."""
    comm = mpikfac.world()
    torch.manual_seed(0)
    model = nn.Sequential(*(LAYERS[kind]() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Strategy(HybridOpt(grad_workers=max(1, comm.size // 2)))
    kfac = mpikfac.KFAC(
        model, optimizer, comm, strategy, inv_update_steps=1, preconditioner=preconditioner
    )
    calls: list[Call] = []
    begun: set[types.FrameType] = set()  # a generator continues in the frame in which it began

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or frame in begun or LIBRARY not in Path(code.co_filename).parents:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            begun.add(frame)
        if code.co_name[0] != "<":  # readers do not follow comprehensions and lambdas
            calls.append((str(Path(code.co_filename).relative_to(LIBRARY)), code.co_name))

    x = torch.randn(4, 8, 6, 8)
    model(x).square().mean().backward()
    kfac.step()
    optimizer.zero_grad()
    with torch.autograd.set_multithreading_enabled(False):  # `note` sees hooks of one thread
        sys.setprofile(note)
        model(x).square().mean().backward()
        kfac.step()
        sys.setprofile(None)
    return calls, kfac.plan.owners[f"{layers - 1}.A"]


def changes(calls: list[Call]) -> int:
    """Return how often two consecutive calls lie in different files."""
    return sum(first[0] != second[0] for first, second in zip(calls, calls[1:]))


if __name__ == "__main__":
    main()
