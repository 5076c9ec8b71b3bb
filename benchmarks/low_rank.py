"""Time leading eigenvectors by iteration compared to `eigh`, and measure the errors of low rank.

    export OMP_NUM_THREADS=1 PYTHONPATH=tests
    python benchmarks/low_rank.py                        # spectra that decay as 1 / i and 1 / i^2
    python benchmarks/low_rank.py --data DIR --steps 20  # input factors of a ResNet-18 in training

For each factor and rank, prints milliseconds of `eigh` and of the iteration, medians of interleaved
calls. Also prints relative errors of directions, in float32, compared to the direction with the
full factor in float64: with the leading eigenvectors from `eigh`, and with the iterated ones. The
other factor is the identity, and damping is relative to the mean eigenvalue.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac.numerics import eigenbases, eigenbasis, triangles
from mpikfac.numerics.eigenbases import _by_iteration, leading_eigenbasis
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import batches
from mpikfac_apps.training.augmentation.moves import Augmentation
from support import inside

ORDERS = (1152, 2304)  # of spectra that follow a law
SHARES = (16, 8, 4)  # rank as a fraction 1 / n of the order
DAMPINGS = (1.0, 0.1)  # in units of the mean eigenvalue
LAYERS = {f"layer{n}.1.conv2" for n in (2, 3, 4)}  # of ResNet-18: 1152, 2304 and 4608 inputs
COLUMNS = ("factor", "rank", "eigh, ms", "iteration", "ratio")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="directory of CIFAR-10; none for spectra of a law")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="image height and width")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = (*COLUMNS, *(f"{way} {d:g}" for d in DAMPINGS for way in ("cut off", "iterated")))
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, factor, gradient in trained(options) if options.data else made():
        for rank, row in measured(factor, gradient, options.repeat):
            print(f"| {name} | {rank} | {' | '.join(row)} |", flush=True)


def made() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Return factors with eigenvalues by a law, and gradients with the factors as moments."""
    for order in ORDERS:
        torch.manual_seed(0)
        basis = torch.linalg.qr(torch.randn(order, order)).Q
        for power in (1, 2):
            values = torch.arange(1, order + 1.0).pow(-power)
            factor = basis * values @ basis.T
            gradient = torch.randn(64, order) * values.sqrt() @ basis.T
            yield f"{order}, 1/i^{power}", (factor + factor.T) / 2, gradient


def trained(options: argparse.Namespace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Return input factors and gradients of a ResNet-18 after some steps of K-FAC."""
    torch.manual_seed(0)
    model = models.build("resnet18", classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    skip = [name for name, _ in model.named_modules() if name and name not in LAYERS]
    skip = [name for name in skip if not any(layer.startswith(f"{name}.") for layer in LAYERS)]
    kfac = mpikfac.KFAC(
        model, optimizer, mpikfac.world(), damping=0.03, coverage=mpikfac.Coverage(skip)
    )
    images = datasets.load("cifar10", options.data, 2_000)
    normalise = batches.Normalise(images.train_images, torch.device("cpu"))
    draw = batches.Batches(
        images.train_images, images.train_labels, 32, seed=0, augment=Augmentation()
    )
    for step in range(options.steps):
        x, labels = draw.get(0, step)
        x = F.interpolate(normalise(x), size=(options.size,) * 2, mode="bilinear")
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        kfac.step()
    for name in sorted(LAYERS):
        factor = triangles.unfold_triangle(inside.factors(kfac)[f"{name}.A"])
        yield f"{len(factor)}, {name}", factor, inside.gradients(kfac)[name].clone()


def measured(factor: Tensor, gradient: Tensor, repeat: int) -> Iterator[tuple[int, list[str]]]:
    """Return ranks, and the remaining cells of the ranks' rows."""
    ranks = [len(factor) // share for share in SHARES]
    iterations = [partial(leading_eigenbasis, factor, rank) for rank in ranks]
    eigh, *iterated = interleaved([partial(eigenbasis, factor), *iterations], repeat)
    values, vectors = eigenbasis(factor)
    exact = {damping: whole(factor, gradient, damping) for damping in DAMPINGS}
    for rank, seconds in zip(ranks, iterated):
        cut_off = with_mean(factor, values[-rank:]), vectors[:, -rank:].contiguous()
        errors = [
            ((direction(factor, basis, gradient, d).double() - e).norm() / e.norm()).item()
            for d, e in exact.items()
            for basis in (cut_off, leading_eigenbasis(factor, rank))
        ]
        note = "" if _by_iteration(factor, rank) else " (eigh)"
        cells = [f"{1e3 * eigh:.0f}", f"{1e3 * seconds:.0f}", f"{seconds / eigh:.2f}{note}"]
        yield rank, cells + [f"{error:.1e}" for error in errors]


def interleaved(ways: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Return the median seconds of each way, called in turn."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeat):
        for way, seconds in zip(ways, times):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    return list(map(statistics.median, times))


def with_mean(factor: Tensor, values: Tensor) -> Tensor:
    """Return eigenvalues with the mean of the missing eigenvalues in front."""
    rest = (factor.trace() - values.sum()) / (len(factor) - len(values))
    return torch.cat([rest.clamp(min=0).view(1), values])


def direction(
    factor: Tensor, basis: tuple[Tensor, Tensor], gradient: Tensor, damping: float
) -> Tensor:
    """Return `gradient (A + damping mean(A) I)^-1`, with A as the basis describes A."""
    values, vectors = basis
    denominators = gradient.new_empty(len(gradient), len(values))
    eigenbases.damped_denominators(
        [values], [], damping * float(factor.diagonal().mean()), denominators
    )
    return eigenbases.precondition(gradient, [vectors], [], denominators)


def whole(factor: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """Return `gradient (A + damping mean(A) I)^-1` with A itself, in float64."""
    damped = factor.double()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    return torch.linalg.solve(damped, gradient.double(), left=False)


if __name__ == "__main__":
    main()
