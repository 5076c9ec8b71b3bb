"""Time the check of a decomposition against its factor, and time a new decomposition.

    export OMP_NUM_THREADS=1
    python benchmarks/fit.py

Prints a row per order: milliseconds, medians on one thread, of the check in
`Refresh(tolerance=...)`, and of the full residual, which the library does not compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mpikfac.numerics import damped_inverse, eigenbasis, error_of_inverse, product, values_in_basis

ORDERS = (64, 128, 256, 512, 1024)
DAMPING = 0.1
WAYS = ("order", "eigh", "its check", "inverse", "its check", "whole residual")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"| {' | '.join(WAYS)} |\n|{'---|' * len(WAYS)}")
    for order in ORDERS:
        times = [milliseconds(way, 15 if order < 600 else 7) for way in ways(order)]
        print(f"| {order} | {' | '.join(f'{each:.2f}' for each in times)} |", flush=True)


def ways(order: int) -> list[Callable[[], object]]:
    """Return the timed functions, for a random factor and its decompositions."""
    torch.manual_seed(0)
    rows = torch.randn(2 * order, order)
    factor = rows.T @ rows / len(rows)
    vectors, inverse = eigenbasis(factor)[1], damped_inverse(factor, DAMPING)
    damped = factor + DAMPING * torch.eye(order)
    return [
        lambda: eigenbasis(factor),
        lambda: values_in_basis(factor, vectors),
        lambda: damped_inverse(factor, DAMPING),
        lambda: error_of_inverse(damped, inverse),
        lambda: whole_residual(damped, inverse),
    ]


def whole_residual(matrix: Tensor, inverse: Tensor) -> float:
    """Return the norm of `matrix @ inverse - I`, relative to the norm of I."""
    residual = product(matrix, inverse)
    residual.diagonal().sub_(1)
    return residual.norm().item() / len(matrix) ** 0.5


def milliseconds(work: Callable[[], object], repetitions: int) -> float:
    """Return the median of `repetitions` calls, after a call that does not count."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


if __name__ == "__main__":
    main()
