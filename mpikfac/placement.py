"""Which rank owns, and works on, what: longest first, to the least loaded. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mpikfac.layout import Shape
from mpikfac.shapes import LayerShape
from mpikfac.strategy import Strategy


def place(
    layers: Sequence[LayerShape], ranks: int, strategy: Strategy, shares_of: dict[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Owner of each factor and column of each layer.

    The load that counts is that of the share of a refresh, as one share is made at a time.
    """
    power = 3 if strategy.balance == "compute" else 2
    columns = ranks // strategy.workers
    jobs: list[tuple[int, LayerShape, list[str]]] = []
    for layer in layers:
        # What every worker decomposes for itself is nobody's load more than another's.
        costs = {
            factor.name: factor.work(power) if factor.order >= strategy.replicate_below else 0
            for factor in layer.factors
        }
        if strategy.colocate:
            jobs.append((sum(costs.values()), layer, list(costs)))
        else:
            jobs += [(cost, layer, [name]) for name, cost in costs.items()]
    loads = [[0] * ranks for _ in range(strategy.stagger)]
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


def deal(layers: Sequence[LayerShape], stagger: int) -> dict[str, int]:
    """The share of a refresh of each layer, longest first, to the share with the least work.

    It does not depend on the ranks, so results do not either.
    """
    load = [0] * stagger
    shares_of = {}
    for layer in sorted(layers, key=lambda layer: -layer.work()):
        shares_of[layer.name] = load.index(min(load))
        load[shares_of[layer.name]] += layer.work()
    return {layer.name: shares_of[layer.name] for layer in layers}
