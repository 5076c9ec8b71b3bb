"""What choices other than the defaults add to a rank's plan: messages, layouts and memory.

The modules of the default plan do not import extensions; `Plan` calls the functions of this module.
"""

from __future__ import annotations

from mpikfac.plan.extensions import (
    curvature_servers,
    encoding,
    robust,
    scales,
    sharding,
    split_layers,
)
from mpikfac.plan.messages import Message
from mpikfac.plan.of_rank import RankPlan, Stage


def replaced(rank: RankPlan) -> dict[str, Stage]:
    """Return functions that replace functions of `stages`, by the name of the stage."""
    return robust.replaced(rank) | split_layers.replaced(rank) | sharding.replaced(rank)


def messages(
    rank: RankPlan, statistics: bool, refresh: bool, turn: int | None = None
) -> list[Message]:
    """Return the messages that extensions add to a step; see `Plan.messages`.

    With replicas of the model, the step ends with an exchange.
    """
    return [
        *(scales.reduce_scales(rank) if statistics else ()),
        *(curvature_servers.send_factors(rank, turn) if refresh else ()),
        *(curvature_servers.receive_bases(rank, turn) if refresh else ()),
        *split_layers.reduce_slices(rank),
        *sharding.gather_gradients(rank),
        *sharding.scatter_directions(rank),
        *rank.strategy.sync.messages(rank),
    ]


def memory(rank: RankPlan) -> dict[str, int]:
    """Return the bytes that extensions keep on the rank, by kind."""
    layouts = {"scales": scales.layout(rank), "scale sums": scales.layout_of_sums(rank)}
    if rank.split.parameters:
        layouts["slices"] = split_layers.layout(rank)
    sizes = {kind: layout.size for kind, layout in layouts.items()}
    sizes["copies"] = rank.strategy.sync.elements(rank)
    if vectors := rank.strategy.sync.aggregation.remembered(rank.grid.count):
        sizes["rule"] = vectors * robust.shards(rank)
    if encoding.encodes(rank):
        sizes["wires"] = encoding.elements(rank)
    return {kind: size * rank.itemsizes.numbers for kind, size in sizes.items()}
