"""Count the waits of the host and the kernels of K-FAC's steps on the emulated GPU.

python tests/emulated/build.py
PYTHONPATH=tests/emulated OMP_NUM_THREADS=1 python benchmarks/waits.py resnet20 inverse eigen
"""

from __future__ import annotations

import argparse

from counting import steps_of


def main() -> None:
    """Print a line for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("solvers", nargs="+")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side of the images")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    for solver in options.solvers:
        steps = steps_of(options.model, options.size, options.batch, solver=solver)
        for kind, step in steps.items():
            waits = ", ".join(f"{count} x {where}" for where, count in step.waits.items())
            counts = f"{step.kernels} kernels, {step.of_model} of them in the passes"
            print(
                f"{options.model} {solver}, {kind}: {counts}; {step.waits.total()} waits: {waits}"
            )


if __name__ == "__main__":
    main()
