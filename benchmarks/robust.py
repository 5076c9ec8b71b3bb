"""Compare robust rules on the digits, and count the right ranks that the safeguard drops.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/robust.py attacks
    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/robust.py campaign
    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/robust.py floors

`attacks`: five ranks train, two of which send the vectors of an attack. One process computes the
gradients of all ranks and combines them by the functions of the library. Prints the median test
accuracy of three seeds, by rule and attack.

`campaign`: the vectors of five right ranks differ by strong noise of a low rank, for two windows of
300 steps. Prints, for each noise and safeguard, in how many of 20 seeds right ranks were excluded
permanently, and the largest fraction of the ranks' vectors that did not count.

`floors`: both for values of `Safeguard.floor`. Prints the lowest test accuracy of nine seeds by
attack, and in how many of 100 seeds right ranks were excluded permanently under noise of rank 1.

Results are kept in `results/robust.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.lab import CenteredClipping, GeometricMedian, Krum, Median, Safeguard, TrimmedMean
from mpikfac.numerics import by_vector
from mpikfac.plan import Aggregation, Mean
from mpikfac_apps.problems import datasets
from support import byzantine

RESULTS = Path(__file__).parent / "results" / "robust.json"
RANKS, WRONG = 5, 2
BATCH, EPOCHS, RATE, MOMENTUM = 16, 30, 0.05, 0.9  # a batch is of one rank
SEEDS = range(3)
RULES = {
    "mean": Mean(),
    "median": Median(),
    "trimmed-mean": TrimmedMean(num_byzantine=WRONG),
    "krum": Krum(num_byzantine=1),  # five ranks are too few for num_byzantine=2
    "geometric-median": GeometricMedian(),
    "centered-clipping": CenteredClipping(radius=1.0),
    "safeguard": Safeguard(),
    "safeguard, before": Safeguard(mean_of="before"),
    "safeguard, readmitting": Safeguard(reset_interval=300),
    "safeguard, no floor": Safeguard(floor=0.0),
}
ATTACKS = ["none", "label flip", *byzantine.OF_GRADIENTS, *byzantine.OF_OWN]

STEPS, SIZE, TRIES = 601, 40, 20  # the last step begins a window
NOISES = {
    **{"rank 1, normal": (1, 1e9), "rank 3, normal": (3, 1e9)},
    **{"rank 3, Student's t": (3, 3.0)},
}
"""The rank of the noise, and the degrees of freedom of Student's t."""
SAFEGUARDS = {
    "no floor, 1.5": Safeguard(threshold=1.5, floor=0.0),
    "no floor": Safeguard(floor=0.0),
    "default, 1.5": Safeguard(threshold=1.5),
    "default": Safeguard(),
    "readmitting": Safeguard(reset_interval=300),
}
FLOORS = (3.0, 3.5, 4.0, 5.0)
FINE = ["a little is enough", "delayed", "rescaled"]  # attacks that a high floor lets pass


def main() -> None:
    """Print a table, and keep its numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("attacks", "campaign", "floors"))
    parser.add_argument("--first", type=int, default=0, help="first seed of the campaign")
    given = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.what == "attacks":
        kept["attacks"] = attacks()
    elif given.what == "floors":
        kept["floors"] = floors()
    else:
        seeds = range(given.first, given.first + TRIES)
        kept[f"campaign, seeds {seeds[0]} to {seeds[-1]}"] = campaign(seeds)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def attacks() -> dict[str, list[float]]:
    """Return test accuracies in %, by rule and attack, of all seeds."""
    found = {}
    print("| rule |", " | ".join(ATTACKS), "|")
    print("|---" * (1 + len(ATTACKS)) + "|")
    for name, rule in RULES.items():
        shown = []
        for attack in ATTACKS:
            of_seeds = [round(100 * accuracy(rule, attack, seed), 2) for seed in SEEDS]
            found[f"{name}, {attack}"] = of_seeds
            shown.append(f"{statistics.median(of_seeds):.1f}")
        print(f"| {name} |", " | ".join(shown), "|", flush=True)
    return found


def campaign(seeds: range) -> dict[str, list[list[float]]]:
    """Return what `dropped` returns, of all seeds, by noise and safeguard."""
    found = {}
    for (noise, drawn), (name, rule) in itertools.product(NOISES.items(), SAFEGUARDS.items()):
        of_seeds = [dropped(rule, *drawn, seed) for seed in seeds]
        found[f"{noise}, {name}"] = of_seeds
        at_end, lost = zip(*of_seeds)
        dropping = sum(count > 0 for count in at_end)
        ends = f"{dropping} of {len(seeds)}"
        print(f"| {noise} | {name} | {ends} | {100 * max(lost):.1f} % |", flush=True)
    return found


def floors() -> dict[str, list[float]]:
    """Return test accuracies in %, and numbers of dropped ranks, by floor, of all seeds."""
    found = {}
    for floor in FLOORS:
        rule = Safeguard(floor=floor)
        lost = [dropped(rule, *NOISES["rank 1, normal"], seed)[0] for seed in range(100)]
        found[f"{floor}, dropped"] = lost
        worst = []
        for attack in FINE:
            of_seeds = [round(100 * accuracy(rule, attack, seed), 2) for seed in range(9)]
            found[f"{floor}, {attack}"] = of_seeds
            worst.append(f"{min(of_seeds):.1f}")
        dropping = sum(count > 0 for count in lost)
        print(f"| {floor} |", " | ".join(worst), f"| {dropping} of {len(lost)} |", flush=True)
    return found


def dropped(rule: Aggregation, rank: int, freedom: float, seed: int) -> list[float]:
    """Return how many right ranks are dropped for good, and the share of vectors not counted."""
    random = np.random.default_rng(seed)
    basis, mean = random.normal(size=(rank, SIZE)), random.normal(size=SIZE)
    safeguard, lost = by_vector(rule, RANKS, torch.zeros(SIZE).double()), 0
    for _ in range(STEPS):
        along = random.standard_t(freedom, size=(RANKS, rank))
        vectors = torch.from_numpy(mean + along @ basis)
        safeguard.combine(safeguard.products(vectors), vectors)
        lost += int(safeguard.memory["dropped"].sum())
    return [int(safeguard.memory["dropped"].sum()), round(lost / (STEPS * RANKS), 4)]


def accuracy(rule: Aggregation, attack: str, seed: int) -> float:
    """Return the test accuracy after a training."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    combine = combiner(rule, sum(p.numel() for p in model.parameters()))
    own: list[Tensor] = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH * RANKS)[:-1]:
            shares = batch.chunk(RANKS)
            vectors = torch.stack(
                [
                    gradient(model, images[share], labels[share], attack, rank)
                    for rank, share in enumerate(shares)
                ]
            )
            own.append(vectors[-WRONG:].clone())
            vectors[-WRONG:] = sent(attack, vectors[:-WRONG], own)
            step(model, optimizer, combine(vectors))
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def sent(attack: str, right: Tensor, own: list[Tensor]) -> Tensor:
    """Return what the wrong ranks send, who know all vectors of the right ranks."""
    if attack in byzantine.OF_GRADIENTS:
        return byzantine.OF_GRADIENTS[attack](right, WRONG)
    return byzantine.OF_OWN[attack](own) if attack in byzantine.OF_OWN else own[-1]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images as vectors, and labels, for training and for test."""
    found = datasets.digits()
    train, test = found.train_images, found.test_images
    numbers = [images.flatten(1).float() / found.white for images in (train, test)]
    return numbers[0], found.train_labels, numbers[1], found.test_labels


def gradient(model: nn.Module, images: Tensor, labels: Tensor, attack: str, rank: int) -> Tensor:
    """Return the gradient of a rank's share of the batch, as a vector."""
    if attack == "label flip" and rank >= RANKS - WRONG:
        labels = byzantine.flipped(labels, 10)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def combiner(rule: Aggregation, size: int) -> Callable[[Tensor], Tensor]:
    """Return the function of the vectors of all ranks."""
    if rule.sums:
        return lambda vectors: vectors.mean(0)
    if not rule.products(RANKS):
        return rule.combine
    found = by_vector(rule, RANKS, torch.zeros(size))
    return lambda vectors: found.combine(found.products(vectors), vectors)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, vector: Tensor) -> None:
    """Step the model by a gradient that all ranks have in common."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, vector.split([p.numel() for p in parameters])):
        parameter.grad = part.view_as(parameter)
    optimizer.step()


if __name__ == "__main__":
    main()
