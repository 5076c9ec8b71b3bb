"""Count what a reader of a default step must read: lines, functions and files of the library.

    mpirun -n 4 python -m mpi4py benchmarks/core.py          # a step
    mpirun -n 4 python -m mpi4py benchmarks/core.py --all    # the construction of KFAC, and steps
    python -m mpi4py benchmarks/core.py --sizes              # lines of the packages and of the core

A convolution and a linear layer are trained with K-FAC by default. Rank 0 counts the lines that the
steps have executed (`executed`), and the lines of the functions that the steps have entered, with
signatures and docstrings (`entered`). The reading path excludes `numerics` and `trace`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import mpikfac
from mpikfac import HybridOpt, Strategy

LIBRARY = Path(mpikfac.__file__).parent
FORMULAS = ("numerics", "trace.py")
BESIDE_CORE = ("lab", "predict", "timeline.py", "comm/messages/encoded.py")
BESIDE_CORE += ("comm/messages/robust.py", "numerics/messages", "plan/extensions", "plan/codec.py")


class Steps:
    """The lines and functions of the library that run, by file."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = collections.defaultdict(set)
        self.functions: set[tuple[str, int]] = set()

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Note the function of a frame; return what notes the function's lines."""
        file = frame.f_code.co_filename
        if not file.startswith(str(LIBRARY)):
            return None
        self.functions.add((file, frame.f_code.co_firstlineno))
        self.lines[file].add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def entered(self) -> dict[str, set[int]]:
        """Return the lines of the functions that were entered, by file."""
        lines: dict[str, set[int]] = collections.defaultdict(set)
        for file in {file for file, _ in self.functions}:
            for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    if (file, begin) in self.functions:
                        lines[file] |= set(range(begin, (node.end_lineno or begin) + 1))
        return lines


def run(everything: bool) -> Steps:
    """Take four steps; with `everything`, the construction counts too."""
    comm, steps = mpikfac.world(), Steps()
    torch.manual_seed(0)
    convolution, head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 10)
    model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    strategy = Strategy(HybridOpt(grad_workers=max(1, comm.size // 2)))
    if everything:
        sys.settrace(steps.enter)
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, inv_update_steps=2)
    sys.settrace(steps.enter)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(4):
            optimizer.zero_grad()
            images, labels = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
            nn.functional.cross_entropy(model(images), labels).backward()
            kfac.step()
    sys.settrace(None)
    return steps


def relative(file: str) -> str:
    """Return a file's path in the library."""
    return str(Path(file).relative_to(LIBRARY))


def counted(steps: Steps) -> dict[str, int]:
    """Return the counts by name."""
    entered = steps.entered()
    path = {f: lines for f, lines in entered.items() if not relative(f).startswith(FORMULAS)}
    return {
        "executed lines": sum(len(steps.lines[file] & lines) for file, lines in entered.items()),
        "functions": len(steps.functions),
        "files": len(entered),
        "entered lines": sum(map(len, entered.values())),
        "reading path, lines": sum(map(len, path.values())),
        "reading path, files": len(path),
    }


def sizes() -> dict[str, tuple[int, int]]:
    """Return lines and files of each package, of the core, and of the library."""
    rooms: dict[str, list[int]] = collections.defaultdict(list)
    for path in LIBRARY.rglob("*.py"):
        name = str(path.relative_to(LIBRARY))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        rooms["the library"].append(lines)
        if not name.startswith(BESIDE_CORE):
            rooms["the core"].append(lines)
        rooms[name.partition("/")[0]].append(lines)
    return {room: (sum(lines), len(lines)) for room, lines in sorted(rooms.items())}


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="count the construction, too")
    parser.add_argument("--sizes", action="store_true", help="count the lines of rooms alone")
    parser.add_argument("--files", action="store_true", help="also print a line for each file")
    options = parser.parse_args()
    if options.sizes:
        for room, (lines, files) in sizes().items():
            print(f"{room}: {lines} lines, {files} files")
        return
    steps = run(options.all)
    if mpikfac.world().rank == 0:
        for name, count in counted(steps).items():
            print(f"{name}: {count}")
        if options.files:
            for file, lines in sorted(steps.entered().items()):
                print(f"  {len(lines)} {relative(file)}")


if __name__ == "__main__":
    main()
