"""How far a reader has to follow a step: calls and changes of file inside the library.

    mpirun -n 4 python -m mpi4py benchmarks/calls.py [linear|conv]

Counts the Python functions of mpikfac that one training step with new factors and bases enters on
rank 0, and how often two consecutive ones lie in different files: in all for a model of one layer,
and for every further layer (the difference between models of three layers and of two).
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torch import nn

import mpikfac

LIBRARY = Path(mpikfac.__file__).parent


def main() -> None:
    """Prints both counts, and the calls of a step of one layer in order."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "conv"
    one, two, three = (entered(kind, layers) for layers in (1, 2, 3))
    if mpikfac.world().rank == 0:
        print("\n".join(f"{file:18s} {name}" for file, name in one))
        print(f"one {kind} layer: {len(one)} calls, {changes(one)} changes of file")
        calls, files = len(three) - len(two), changes(three) - changes(two)
        print(f"every further layer: {calls} calls, {files} changes of file")


def entered(kind: str, layers: int) -> list[tuple[str, str]]:
    """File and name of every library function that a step enters, in order."""
    comm = mpikfac.world()
    make = {"linear": lambda: nn.Linear(8, 8), "conv": lambda: nn.Conv2d(8, 8, 3, padding=1)}[kind]
    model = nn.Sequential(*(make() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = mpikfac.Strategy.hybrid(comm.size, workers=max(1, comm.size // 2))
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, basis_every=1)
    calls: list[tuple[str, str]] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Comprehensions and resumed context managers are not places that a reader goes to.
        if event == "call" and Path(code.co_filename).parent == LIBRARY and code.co_name[0] != "<":
            calls.append((Path(code.co_filename).name, code.co_name))

    x = torch.randn(4, 8, 6, 8)
    with torch.autograd.set_multithreading_enabled(False):  # hooks run, and are seen, here
        sys.setprofile(note)
        model(x).square().mean().backward()
        kfac.step()
        sys.setprofile(None)
    return calls


def changes(calls: list[tuple[str, str]]) -> int:
    """How often two consecutive calls lie in different files."""
    return sum(first[0] != second[0] for first, second in zip(calls, calls[1:]))


if __name__ == "__main__":
    main()
