"""Compare robust rules on the digits: five ranks, two of which send the numbers of an attack.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/robust.py

One process computes the gradients of all ranks and combines the gradients by the functions of the
library. Prints the median test accuracy of three seeds, rule by rule and attack by attack.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.numerics import BY_COORDINATE, by_vector
from mpikfac.plan import Robust
from mpikfac_apps.problems import datasets
from support import liars

RANKS, WRONG = 5, 2
BATCH, EPOCHS, RATE, MOMENTUM = 16, 30, 0.05, 0.9  # a batch is of one rank
SEEDS = range(3)
RULES = [
    Robust("mean"),
    Robust("median"),
    Robust("trimmed-mean", liars=WRONG),
    Robust("krum", liars=1),  # five ranks are too few for liars=2
    Robust("geometric-median"),
    Robust("centred-clip", clip_radius=1.0),
    Robust("safeguard"),
]
ATTACKS = ["none", "label flip", *liars.OF_GRADIENTS]


def main() -> None:
    """Print the table."""
    print("| rule |", " | ".join(ATTACKS), "|")
    print("|---" * (1 + len(ATTACKS)) + "|")
    for rule in RULES:
        shown = [
            f"{100 * statistics.median(accuracy(rule, attack, seed) for seed in SEEDS):.1f}"
            for attack in ATTACKS
        ]
        print(f"| {rule.combine} |", " | ".join(shown), "|", flush=True)


def accuracy(rule: Robust, attack: str, seed: int) -> float:
    """Return the test accuracy after a training."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    combine = combiner(rule, sum(p.numel() for p in model.parameters()))
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH * RANKS)[:-1]:
            shares = batch.chunk(RANKS)
            vectors = torch.stack(
                [
                    gradient(model, images[share], labels[share], attack, rank)
                    for rank, share in enumerate(shares)
                ]
            )
            if attack in liars.OF_GRADIENTS:
                right = vectors[:-WRONG]
                vectors[-WRONG:] = liars.OF_GRADIENTS[attack](right, WRONG)
            step(model, optimizer, combine(vectors))
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).float().mean())


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images as vectors, and labels, for training and for test."""
    found = datasets.digits()
    train, test = found.train_images, found.test_images
    numbers = [images.flatten(1).float() / found.white for images in (train, test)]
    return numbers[0], found.train_labels, numbers[1], found.test_labels


def gradient(model: nn.Module, images: Tensor, labels: Tensor, attack: str, rank: int) -> Tensor:
    """Return the gradient of a rank's share of the batch, as a vector."""
    if attack == "label flip" and rank >= RANKS - WRONG:
        labels = liars.flipped(labels, 10)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def combiner(rule: Robust, size: int):
    """Return the function of the vectors of all ranks."""
    if rule.combine == "mean":
        return lambda vectors: vectors.mean(0)
    if rule.combine in BY_COORDINATE:
        return lambda vectors: BY_COORDINATE[rule.combine](vectors, rule)
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
