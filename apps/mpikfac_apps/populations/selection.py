"""Select members of a population to replace and their parents, and create their children.

The functions are pure: all ranks compute the same result, for any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Any]


class Parents(NamedTuple):
    """The members whose states a replaced member inherits; both are the same without crossover."""

    first: int
    second: int


def replacements(
    ranking: Sequence[int],
    lost: Collection[int],
    worst: float,
    crossover: bool,
    generator: torch.Generator,
) -> dict[int, Parents]:
    """Return the parents of each member that is replaced [Jaderberg et al. 2017, truncation].

    Args:
        ranking: the members, the best first.
        lost: members that are replaced wherever they are in the ranking, except in the first place.
        worst: the fraction of the members to replace, taken from the end of the ranking.
        crossover: whether a second parent is drawn, from all members that are kept.
    """
    count = max(1, int(worst * len(ranking)))
    replaced = {*ranking[-count:], *lost} - {ranking[0]}
    staying = [member for member in ranking if member not in replaced]
    best = staying[:count]
    return {
        child: Parents(
            first := drawn(best, generator), drawn(staying, generator) if crossover else first
        )
        for child in sorted(replaced)
    }


def drawn(members: Sequence[int], generator: torch.Generator) -> int:
    """Return a random member."""
    return members[int(torch.randint(len(members), (), generator=generator))]


def explored(
    numbers: Mapping[str, float], factor: float, generator: torch.Generator
) -> dict[str, float]:
    """Return the hyperparameters, each of them multiplied or divided by `factor` at random."""
    signs = (2 * torch.randint(2, (len(numbers),), generator=generator) - 1).tolist()
    return {name: value * factor**sign for (name, value), sign in zip(numbers.items(), signs)}


def first_numbers(
    numbers: Mapping[str, float], spread: float, generator: torch.Generator
) -> dict[str, float]:
    """Return the hyperparameters, each times a log-uniform factor from 1/spread to spread."""
    draws = (2 * torch.rand(len(numbers), generator=generator, dtype=torch.float64) - 1).tolist()
    return {name: value * spread**draw for (name, value), draw in zip(numbers.items(), draws)}


def crossed(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    layers: Collection[str],
    generator: torch.Generator,
) -> State:
    """Return a state in which each layer comes from one of two members' states, at random.

    The weights, momentum and curvature of a layer stay together. Everything that belongs to no
    layer comes from the first state.

    Args:
        layers: the names of the modules with parameters.
    """
    sides = torch.randint(2, (len(layers),), generator=generator).tolist()
    turned = [name for name, side in zip(sorted(layers), sides) if side]
    taken = {name: second[name] for name in second if any(of_layer(name, of) for of in turned)}
    kept = {name: first[name] for name in first if not any(of_layer(name, of) for of in turned)}
    return kept | taken


def of_layer(item: str, layer: str) -> bool:
    """Return whether an item of a state belongs to a layer, such as `model/3.weight` to layer 3."""
    return re.search(rf"/{re.escape(layer)}([.#]|/|$)", f"/{item.partition('/')[2]}") is not None


def mutated(
    state: Mapping[str, Any], names: Collection[str], size: float, generator: torch.Generator
) -> State:
    """Return a state in which Gaussian noise is added to the tensors `names`.

    The standard deviation of the noise is `size` times the root mean square of the tensor.
    """
    changed = dict(state)
    for name in sorted(names):
        weights = state[name]
        noise = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        scale = size * weights.double().square().mean().sqrt()
        changed[name] = (weights.double().cpu() + scale.cpu() * noise).to(weights)
    return changed


def suppressed(ranking: Sequence[int], distances: Tensor, near: float) -> set[int]:
    """Return the members that are not the best of their cluster of similar members.

    Clusters start as single members. As long as the smallest mean distance between two clusters is
    less than `near`, these two clusters are joined.

    Args:
        ranking: the members, the best first.
        distances: the distances between members `[members, members]`.
    """
    clusters = [[member] for member in sorted(ranking)]
    while len(clusters) > 1:
        pairs = [(i, j) for i in range(len(clusters)) for j in range(i)]
        apart = [float(distances[clusters[i]][:, clusters[j]].mean()) for i, j in pairs]
        least = min(range(len(pairs)), key=apart.__getitem__)
        if not apart[least] < near:
            break
        into, other = pairs[least]
        clusters[into] += clusters[other]
        del clusters[other]
    best = {min(cluster, key=ranking.index) for cluster in clusters}
    return set(ranking) - best


def distances_of(weights: Sequence[Tensor]) -> Tensor:
    """Return the distances between vectors, each relative to the mean of the two norms."""
    vectors = torch.stack([vector.double().cpu() for vector in weights])
    norms = vectors.norm(dim=1)
    apart = torch.stack([(vectors - vector).norm(dim=1) for vector in vectors])
    return apart / ((norms + norms.unsqueeze(1)) / 2)
