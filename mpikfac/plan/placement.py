"""Which rank owns, and works on, what: longest first, to the least loaded. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from mpikfac.plan.layout import Shape
from mpikfac.plan.shapes import LayerShape
from mpikfac.plan.strategy import Strategy


def place(
    layers: Sequence[LayerShape],
    vectors: Collection[str],
    ranks: int,
    strategy: Strategy,
    shares_of: dict[str, int],
) -> tuple[dict[str, int], dict[str, int]]:
    """Owner of each factor and column of each layer.

    The load that counts is that of the share of a refresh, as one share is made at a time.

    Args:
        vectors: layers whose factors are kept as vectors.
    """
    power = 3 if strategy.balance == "compute" else 2
    columns = ranks // strategy.workers
    jobs: list[tuple[int, LayerShape, list[str]]] = []
    for layer in layers:
        costs = _costs(layer, vectors, power)
        # What every worker decomposes for itself is nobody's load more than another's.
        costs |= {f.name: 0 for f in layer.factors if f.order < strategy.replicate_below}
        if strategy.colocate:
            jobs.append((sum(costs.values()), layer, list(costs)))
        else:
            jobs += [(cost, layer, [name]) for name, cost in costs.items()]
    loads = [[0] * ranks for _ in range(strategy.refresh.stagger)]
    placed: dict[str, int] = {}
    columns_of: dict[str, int] = {}
    for cost, layer, names in sorted(jobs, key=lambda job: -job[0]):
        # The first factor to be placed fixes the layer's column; the others stay inside it.
        column = columns_of.get(layer.name)
        candidates = range(ranks) if column is None else range(column, ranks, columns)
        load = loads[shares_of[layer.name]]
        owner = min(candidates, key=load.__getitem__)
        columns_of[layer.name] = owner % columns
        load[owner] += cost
        placed |= dict.fromkeys(names, owner)
    order = [factor.name for layer in layers for factor in layer.factors]
    return {name: placed[name] for name in order}, columns_of


def spread(others: Iterable[tuple[str, Shape]], ranks: int) -> dict[str, int]:
    """Updater of each uncovered parameter: largest first, to the rank with the fewest elements."""
    load = [0] * ranks
    updaters = {}
    for name, shape in sorted(others, key=lambda other: -math.prod(other[1])):
        updaters[name] = load.index(min(load))
        load[updaters[name]] += math.prod(shape)
    return updaters


def deal(layers: Sequence[LayerShape], vectors: Collection[str], stagger: int) -> dict[str, int]:
    """The share of a refresh of each layer, longest first, to the share with the least work.

    It does not depend on the ranks, so results do not either.
    """
    load = [0] * stagger
    shares_of = {}
    works = {layer.name: sum(_costs(layer, vectors).values()) for layer in layers}
    for name in sorted(works, key=lambda name: -works[name]):
        shares_of[name] = load.index(min(load))
        load[shares_of[name]] += works[name]
    return {name: shares_of[name] for name in works}


def _costs(layer: LayerShape, vectors: Collection[str], power: int = 3) -> dict[str, int]:
    """What each factor adds to a load; a vector, which nobody decomposes, its elements."""
    power = 1 if layer.name in vectors else power
    return {factor.name: factor.work(power) for factor in layer.factors}
