"""Rank layers by the loss that quantising or pruning their weights costs, from the curvature.

    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/sensitivity.py

Two networks of six layers learn digits by K-FAC. The weight of one layer at a time is changed by v,
and `v^T C v / 2` is compared with the change of the training loss, by their rank correlation.
"""

from __future__ import annotations

import argparse
import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from posterior import train
from torch import Tensor, nn

from mpikfac.lab import Curvature
from mpikfac_apps.problems import datasets

BATCH, EPOCHS = 48, 6


def perceptron() -> nn.Module:
    widths = 64, 48, 40, 32, 24, 16, 10
    layers = [part for n, m in zip(widths, widths[1:]) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def convolutions() -> nn.Module:
    sizes = (1, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)
    layers = [part for n, m, s in sizes for part in (nn.Conv2d(n, m, 3, s, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))


def quantised(bits: int, weight: Tensor) -> Tensor:
    """Round to the nearest of 2^bits - 1 levels, symmetric around 0, with one scale per tensor."""
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def pruned(share: float, weight: Tensor) -> Tensor:
    """Set the smallest weights to 0."""
    limit = weight.abs().flatten().kthvalue(int(share * weight.numel())).values
    return torch.where(weight.abs() <= limit, 0, weight)


CHANGES = {
    **{f"{bits} bits": partial(quantised, bits) for bits in (8, 4, 3)},
    **{f"{share:.0%} pruned": partial(pruned, share) for share in (0.2, 0.5, 0.8)},
}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    ranks = (torch.tensor(values).argsort().argsort().double() for values in (first, second))
    return torch.corrcoef(torch.stack([*ranks]))[0, 1].item()


@torch.no_grad()
def changes_of_loss(model: nn.Module, curvature: Curvature, images: Tensor, labels: Tensor):
    """Return the predicted and the actual change for each change of each layer, by their names."""
    parameters = dict(model.named_parameters())
    before, found = F.cross_entropy(model(images), labels).item(), {}
    for change, function in CHANGES.items():
        for name, weight in parameters.items():
            if name.endswith("weight"):
                own = weight.clone()
                moved = {n: torch.zeros_like(p) for n, p in parameters.items()}
                moved[name] = function(own) - own
                product = curvature.apply(moved, lambda values: values)[name]
                weight.copy_(function(own))
                after = F.cross_entropy(model(images), labels).item()
                weight.copy_(own)
                found[change, name] = (moved[name] * product).sum().item() / 2, after - before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    data = datasets.load("digits")
    images, labels = data.train_images.float(), data.train_labels
    images = (images - images.mean()) / images.std()
    table: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for make in (perceptron, convolutions):
        for fisher_type in ("empirical", "type-2"):
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                kfac = train(make(), images, labels, fisher_type, BATCH, EPOCHS)
                model = kfac.model.eval().double()
                found = changes_of_loss(model, Curvature.of(kfac), images.double(), labels)
                row = table[f"{make.__name__}, {fisher_type}"]
                row["all"].append(rank_correlation(*zip(*found.values())))
                for change in CHANGES:
                    pairs = [pair for (own, _), pair in found.items() if own == change]
                    row[change].append(rank_correlation(*zip(*pairs)))
                kfac.close()
    for name, row in table.items():
        print(name, *(f"{change} {sum(v) / len(v):.2f}" for change, v in row.items()), sep="; ")


if __name__ == "__main__":
    main()
