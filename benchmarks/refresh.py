"""Measure time and error of ways to refresh the decompositions of all factors of a network.

    export OMP_NUM_THREADS=1
    PYTHONPATH=tests python benchmarks/refresh.py record --data DIR --out runs/refresh
    PYTHONPATH=tests python benchmarks/refresh.py time --out runs/refresh
    PYTHONPATH=tests python benchmarks/refresh.py errors --out runs/refresh
    PYTHONPATH=tests python benchmarks/refresh.py along --data DIR --out runs/refresh \
        --model resnet20 --size 32 --steps 400
    PYTHONPATH=tests python benchmarks/refresh.py curves --data DIR --out runs/refresh \
        --model resnet20 --size 32 --steps 160
    PYTHONPATH=tests python benchmarks/refresh.py orders --out runs/refresh

`record` trains, and keeps gradients and the factors' running averages of the last step and of 10
steps earlier. At the earlier step, all factors were decomposed exactly. `record` also keeps the
exact directions, in float64. `time` prints the total over factors of the median seconds of each
candidate. `errors` prints relative errors of the direction over layers. This file contains the
candidates that gained too little to be included in the library.

`along` trains with `eigen` at the default intervals. At every refresh it renews separate
eigenvectors by orthogonal iterations, starting from the first decomposition, and prints the misfit
and the cosine with the exact direction over layers. `curves` prints the loss of whole runs by
preconditioner and seed, and continues where it was stopped. `orders` times an iteration and eigh
for a single factor.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac import MemOpt, Refresh, Strategy
from mpikfac.numerics import damped_inverse, eigenbasis, product, tikhonov_share, triangles
from mpikfac.preconditioners import Eigen
from mpikfac.settings import RATE
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import batches
from mpikfac_apps.training.augmentation.moves import Augmentation
from support import inside

INTERVAL = 10  # steps between refreshes
DAMPINGS = (1e-3, 3e-2)
ITERATIONS = (0, 1, 2)  # of the chains of `along`
SHARES = (10.0, 0.1)  # dampings of `along`, in mean eigenvalues; 10 is the default
SEEDS = 0, 1, 2
LAST = 40  # steps of `curves` with a mean loss
PRECONDITIONERS = {  # of `curves`, with the tolerance
    "eigh": (Eigen(), 0.0),
    "one iteration": (Eigen(iterations=1), 0.3),
    "eigenvectors kept": (Eigen(), 1e9),
}
WINDOW = 128  # neighbouring eigenvectors, resolved exactly

Basis = tuple[Tensor, Tensor]


def main() -> None:
    """Record, or print a table of times or of errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "time", "errors", "along", "curves", "orders"])
    parser.add_argument("--out", type=Path, required=True, help="directory of the recording")
    parser.add_argument("--data", help="directory of CIFAR-10")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64, help="image height and width")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="*", default=[*EIGEN, *INVERSE], help="default: all")
    options = parser.parse_args()
    if options.what in (own := {"along": along, "curves": curves, "orders": print_orders}):
        own[options.what](options)
        return
    if options.what == "record":
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(record(options), options.out / "recording.pt")
        return
    layers = torch.load(options.out / "recording.pt", map_location=options.device)
    (print_times if options.what == "time" else print_errors)(layers, options.methods)


# -- recording -----------------------------------------------------------------------------------


def record(options: argparse.Namespace) -> dict[str, dict]:
    """Return by layer: `gradient`, factors now and 10 steps before, old bases, exact directions."""
    before: dict[str, Tensor] = {}
    kfac = made(options, lr=0.05, preconditioner="inverse", damping=0.03)
    for step, _ in trained(kfac, options):
        if step == options.steps - INTERVAL:
            before = unfolded(kfac)
    now = unfolded(kfac)
    gradients = {name: inside.gradients(kfac)[name].clone() for name in inside.directions(kfac)}
    return {name: recorded(name, gradients[name], before, now) for name in gradients}


def made(
    options: argparse.Namespace,
    lr: float,
    strategy: mpikfac.Strategy | None = None,
    seed: int = 0,
    **choices: object,
) -> mpikfac.KFAC:
    """Return K-FAC for a new model."""
    torch.manual_seed(seed)
    model = models.build(options.model, classes=10).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    return mpikfac.KFAC(model, optimizer, mpikfac.world(), strategy, **choices)


def unfolded(kfac: mpikfac.KFAC) -> dict[str, Tensor]:
    """Return copies of all running averages of factors, `[n, n]`, by name."""
    return {name: triangles.unfold_triangle(f) for name, f in inside.factors(kfac).items()}


def trained(
    kfac: mpikfac.KFAC, options: argparse.Namespace, seed: int = 0
) -> Iterator[tuple[int, float]]:
    """Yield the number and the loss of every step, after the step."""
    images = datasets.load("cifar10", options.data, 10_000)
    normalise = batches.Normalise(images.train_images, torch.device("cpu"))
    draw = batches.Batches(
        images.train_images,
        images.train_labels,
        options.batch,
        seed=seed,
        augment=Augmentation(),
    )
    steps_per_epoch = len(images.train_images) // options.batch
    for step in range(options.steps + 1):
        x, labels = draw.get(*divmod(step, steps_per_epoch))
        x = F.interpolate(normalise(x), size=(options.size,) * 2, mode="bilinear")
        kfac.optimizer.zero_grad()
        loss = F.cross_entropy(kfac.model(x.to(options.device)), labels.to(options.device))
        loss.backward()
        kfac.step()
        yield step, loss.item()


def recorded(
    name: str, gradient: Tensor, before: dict[str, Tensor], now: dict[str, Tensor]
) -> dict:
    """Return the record of a layer."""
    a, g = now[f"{name}.A"], now[f"{name}.G"]
    then = before[f"{name}.A"], before[f"{name}.G"]
    exact = exact_directions(gradient.double(), a.double(), g.double())
    return {
        "gradient": gradient,
        "factors": (a, g),
        "factors before": then,
        "bases before": tuple(eigenbasis(factor) for factor in then),
        "exact": {key: direction.float() for key, direction in exact.items()},
    }


def exact_directions(gradient: Tensor, a: Tensor, g: Tensor) -> dict[tuple[str, float], Tensor]:
    """Return directions by preconditioner and damping."""
    bases = eigenbasis(a), eigenbasis(g)
    directions = {}
    for damping in DAMPINGS:
        directions["eigen", damping] = by_bases(gradient, bases, damping)
        shares = shares_of(a, g, damping)
        inverses = [damped_inverse(f, share) for f, share in zip((a, g), shares)]
        directions["inverse", damping] = inverses[1] @ gradient @ inverses[0]
    return directions


def shares_of(a: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return the damping of A and of G."""
    means = a.diagonal().mean(), g.diagonal().mean()
    ratio = means[0] / means[1]
    return tikhonov_share(ratio, damping), tikhonov_share(1 / ratio, damping)


def by_bases(gradient: Tensor, bases: tuple[Basis, Basis], damping: float) -> Tensor:
    """Return the direction from eigenbases of A and G."""
    (a_values, a_vectors), (g_values, g_vectors) = bases
    rotated = g_vectors.T @ gradient @ a_vectors / (torch.outer(g_values, a_values) + damping)
    return g_vectors @ rotated @ a_vectors.T


# -- orthogonal iterations ------------------------------------------------------------------------


def along(options: argparse.Namespace) -> None:
    """Train, renew eigenvectors at every refresh, and print and keep misfits and cosines."""
    kfac = made(options, lr=RATE, preconditioner="eigen")
    chains: dict[int, dict[str, Basis]] = {}
    rows = []
    for step, _ in trained(kfac, options):
        if not inside.due(kfac, step)[1]:
            continue
        factors = unfolded(kfac)
        exact = {name: eigenbasis(factor.double()) for name, factor in factors.items()}
        gradients = {name: inside.gradients(kfac)[name] for name in inside.directions(kfac)}
        start = time.perf_counter()
        decomposed = {name: eigenbasis(factor) for name, factor in factors.items()}
        rows.append({"step": step, "eigh, seconds": time.perf_counter() - start})
        for iterations in ITERATIONS:
            if step == 0:
                chains[iterations] = decomposed
                continue
            start = time.perf_counter()
            misfits = renew(factors, chains[iterations], iterations)
            taken = time.perf_counter() - start
            rows.append(
                {"step": step, "iterations": iterations, "seconds": taken, "misfits": misfits}
            )
            for share in SHARES:
                found = cosines(gradients, chains[iterations], exact, share)
                rows[-1][f"cosines, damping {share:g}"] = found
                print(step, iterations, share, f"{taken:.3f} s", spread(misfits), found, flush=True)
        (options.out / "along.json").write_text(json.dumps(rows))


def curves(options: argparse.Namespace) -> None:
    """Train with every preconditioner and seed; keep losses, and print means of the last steps."""
    file = options.out / "curves.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name, (preconditioner, tolerance) in PRECONDITIONERS.items():
        strategy = Strategy(MemOpt(), refresh=Refresh(tolerance=tolerance))
        for seed in SEEDS:
            if (key := f"{name}, seed {seed}") not in found:
                kfac = made(options, RATE, strategy, seed, preconditioner=preconditioner)
                found[key] = [round(loss, 5) for _, loss in trained(kfac, options, seed)]
                file.write_text(json.dumps(found))
            print(f"| {key} | {statistics.mean(found[key][-LAST:]):.4f} |", flush=True)


def renew(factors: dict[str, Tensor], chain: dict[str, Basis], iterations: int) -> list[float]:
    """Renew all eigenvectors of a chain in place; return the misfits."""
    preconditioner, misfits = Eigen(iterations=iterations), []
    for name, factor in factors.items():
        vectors = chain[name][1]
        blocks, misfit = preconditioner.renew(factor, {"vectors": vectors}, None)
        chain[name] = blocks["values"], blocks.get("vectors", vectors)
        misfits.append(round(misfit.item(), 4))
    return misfits


def cosines(
    gradients: dict[str, Tensor], ours: dict[str, Basis], exact: dict[str, Basis], share: float
) -> tuple[float, float]:
    """Return median and least cosine of directions with exact directions, over layers.

    Args:
        share: the damping, in units of the mean eigenvalue.
    """
    found = []
    for name, gradient in gradients.items():
        sides = [[bases[f"{name}.{side}"] for side in "AG"] for bases in (ours, exact)]
        damping = share * math.prod(values.mean().item() for values, _ in sides[1])
        directions = [
            by_bases(gradient.double(), [(v.double(), q.double()) for v, q in pair], damping)
            for pair in sides
        ]
        found.append(F.cosine_similarity(*(d.flatten() for d in directions), dim=0).item())
    return round(statistics.median(found), 5), round(min(found), 5)


def print_orders(options: argparse.Namespace) -> None:
    """Print seconds of eigh and of an orthogonal iteration by order, and the ratio."""
    for order in (64, 144, 288, 576, 1152, 2304, 4608):
        torch.manual_seed(0)
        scale = 1 / torch.arange(1.0, order + 1)
        rows = torch.randn(2 * order, order, device=options.device) * scale.to(options.device)
        factor = rows.T @ rows / len(rows)
        vectors = eigenbasis(factor)[1]
        by_eigh, by_iteration = [], []
        for _ in range(5):
            by_eigh.append(seconds(lambda f=factor: eigenbasis(f), 1))
            older = {"vectors": vectors}
            call = partial(Eigen(iterations=1).renew, factor, older, None)
            by_iteration.append(seconds(call, 1))
        both = statistics.median(by_eigh), statistics.median(by_iteration)
        ratio = statistics.median(b / a for a, b in zip(by_eigh, by_iteration))
        print(f"| {order} | {both[0]:.4f} s | {both[1]:.4f} s | {ratio:.2f} |", flush=True)


# -- candidates ----------------------------------------------------------------------------------


def reestimated(factor: Tensor, basis: Basis, floor: float) -> Basis:
    """Return the old eigenvectors, with new eigenvalues `diag(Q^T F Q)`."""
    vectors = basis[1]
    return (vectors * product(factor, vectors)).sum(0).clamp_(min=0), vectors


def rotated(factor: Tensor, basis: Basis, floor: float) -> Basis:
    """Return the old eigenvectors, rotated once towards the new eigenvectors.

    `T = Q^T F Q` is diagonalised exactly within windows of neighbouring eigenvalues. Couplings
    between windows are removed at first order, by the skew-symmetric `T_ij / (t_j - t_i)`, in a
    Cayley transform that keeps Q orthogonal. Gaps are bounded from below by a tenth of the
    eigenvalues plus `floor`, the eigenvalue equal to the damping: eigenvalues with smaller gaps
    need no rotation.
    """
    vectors = basis[1]
    rotated = product(vectors.T, product(factor, vectors))
    order = rotated.diagonal().argsort()
    vectors, rotated = vectors[:, order], rotated[order][:, order]
    for start in range(0, len(order), WINDOW):
        window = slice(start, start + WINDOW)
        within = torch.linalg.eigh(rotated[window, window]).eigenvectors
        vectors[:, window] = vectors[:, window] @ within
        rotated[:, window] = rotated[:, window] @ within
        rotated[window] = within.T @ rotated[window]
    values = rotated.diagonal().clamp(min=0)
    gap = values - values[:, None]
    least = 0.1 * (floor + (values + values[:, None]) / 2)
    angles = rotated * gap / (gap.square() + least.square())
    half = (angles - angles.T) / 4
    one = torch.eye(len(half)).to(half)
    return values, product(vectors, torch.linalg.solve(one - half, one + half))


def twice(factor: Tensor, basis: Basis, floor: float) -> Basis:
    """Rotate twice, and re-estimate eigenvalues at the end."""
    basis = rotated(factor, rotated(factor, basis, floor), floor)
    return reestimated(factor, basis, floor)


def once(factor: Tensor, basis: Basis, floor: float) -> Basis:
    """Rotate once, and re-estimate eigenvalues at the end."""
    return reestimated(factor, rotated(factor, basis, floor), floor)


def cholesky(factor: Tensor, share: Tensor, old: Tensor) -> Tensor:
    """Return `(factor + share I)^-1` by LAPACK alone."""
    damped = factor.clone()
    damped.diagonal().add_(share)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))


def newton_schulz(factor: Tensor, share: Tensor, old: Tensor) -> Tensor:
    """Return the old inverse X after one step `X (2 I - M X)`; M = factor + share I."""
    residual = product(factor, old).add_(old, alpha=share.item()).neg_()
    residual.diagonal().add_(2)
    return product(old, residual)


EIGEN: dict[str, Callable[[Tensor, Basis, float], Basis]] = {
    "eigh": lambda factor, old, floor: eigenbasis(factor),
    "eigenvectors of 10 steps ago": lambda factor, old, floor: old,
    "... with new eigenvalues": reestimated,
    "... rotated once": once,
    "... rotated twice": twice,
}
INVERSE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Cholesky": cholesky,
    "by blocks (damped_inverse)": lambda factor, share, old: damped_inverse(factor, share),
    "inverse of 10 steps ago": lambda factor, share, old: old,
    "... after a Newton-Schulz step": newton_schulz,
    "... after two Newton-Schulz steps": lambda factor, share, old: newton_schulz(
        factor, share, newton_schulz(factor, share, old)
    ),
}


def refreshers(layer: dict, method: str, damping: float) -> list[Callable[[], Basis | Tensor]]:
    """Return functions without arguments that refresh A and G of a layer."""
    (a, g), then = layer["factors"], layer["factors before"]
    if method in EIGEN:
        bases = layer["bases before"]
        floors = [damping / other[0].max().clamp(min=1e-30).item() for other in reversed(bases)]
        calls = zip((a, g), bases, floors)
        return [lambda call=call: EIGEN[method](*call) for call in calls]
    shares = shares_of(a, g, damping)
    old = [damped_inverse(*pair) for pair in zip(then, shares_of(*then, damping))]
    return [lambda call=call: INVERSE[method](*call) for call in zip((a, g), shares, old)]


# -- tables --------------------------------------------------------------------------------------


def print_times(layers: dict[str, dict], methods: list[str]) -> None:
    """Print seconds of all factors at the first damping, by method, and ratios to eigh by order."""
    taken: dict[str, dict[int, float]] = {}
    for method in dict.fromkeys(["eigh", *methods]):
        by_order = taken[method] = {}
        for layer in layers.values():
            for factor, refresh in zip(layer["factors"], refreshers(layer, method, DAMPINGS[0])):
                n = len(factor)
                by_order[n] = by_order.get(n, 0) + seconds(refresh, 5 if n <= 1152 else 1)
        total, reference = sum(by_order.values()), sum(taken["eigh"].values())
        print(f"| {method} | {total:.2f} s | {reference / total:.1f} |", end="", flush=True)
        ratios = {n: taken["eigh"][n] / by_order[n] for n in sorted(by_order)}
        print("".join(f" {n}: {ratio:.1f}" for n, ratio in ratios.items()), "|", flush=True)


def seconds(refresh: Callable[[], object], repetitions: int) -> float:
    """Return the median of `repetitions` calls; of many calls, the first call does not count."""
    times = []
    for _ in range(repetitions + (repetitions > 1)):
        synchronise()
        start = time.perf_counter()
        refresh()
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times[-repetitions:])


def synchronise() -> None:
    """Wait for the GPU, if present."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def print_errors(layers: dict[str, dict], methods: list[str]) -> None:
    """Print median, 90th percentile and worst error by method and damping, for both exact ways."""
    for method in methods:
        preconditioner = "eigen" if method in EIGEN else "inverse"
        for damping in DAMPINGS:
            own, eigen = [], []
            for layer in layers.values():
                found = direction(layer, method, damping)
                own.append(error(found, layer["exact"][preconditioner, damping]))
                eigen.append(error(found, layer["exact"]["eigen", damping]))
            print(f"| {method} | {damping:.0e} | {spread(own)} | {spread(eigen)} |", flush=True)


def direction(layer: dict, method: str, damping: float) -> Tensor:
    """Return a layer's direction after a refresh of the factors by `method`."""
    a, g = (refresh() for refresh in refreshers(layer, method, damping))
    if method in EIGEN:
        return by_bases(layer["gradient"], (a, g), damping)
    return g @ layer["gradient"] @ a


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error, in the Frobenius norm."""
    return ((found - exact).norm() / exact.norm()).item()


def spread(errors: list[float]) -> str:
    """Return median, 90th percentile and maximum."""
    quantiles = statistics.quantiles(errors, n=10, method="inclusive")
    return " / ".join(f"{value:.1e}" for value in (quantiles[4], quantiles[8], max(errors)))


if __name__ == "__main__":
    main()
