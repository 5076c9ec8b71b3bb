"""The messages between the shards of a model and the owners of its layers."""

from __future__ import annotations

from mpikfac.plan import names
from mpikfac.plan.messages import Message, message, rows
from mpikfac.plan.of_rank import RankPlan, Stage


def replaced(rank: RankPlan) -> dict[str, Stage]:
    """Return the stages that are different for a sharded model, which no rank holds completely."""
    if not rank.sharding:
        return {}
    return {names.REDUCE_GRADIENTS: reduce_means, names.PUBLISH_WEIGHTS: publish_nothing}


def reduce_means(rank: RankPlan, _turn: int | None = None) -> list[Message]:
    """Return the reduction of votes and running statistics, which every rank holds completely."""
    if rank.grid.count == 1:
        return []
    spans = rank.layouts.gradients.segments()[:1]
    ranks, size = rank.grid.count, rank.itemsizes.numbers
    return [message(names.REDUCE_GRADIENTS, "Allreduce", "world", spans, ranks, size)]


def publish_nothing(_rank: RankPlan, _turn: int | None = None) -> list[Message]:
    """Return no messages, because the next forward pass gathers the updated weights."""
    return []


def gather_gradients(rank: RankPlan) -> list[Message]:
    """Return the message that sends shards of averaged gradients to the owners of their layers."""
    if not rank.sharding:
        return []
    counts = rank.sharding.gathered
    return rows(names.GATHER_GRADIENTS, counts, rank.itemsizes.numbers, rank.rank)


def scatter_directions(rank: RankPlan) -> list[Message]:
    """Return the message that sends directions from owners to the shards."""
    if not rank.sharding:
        return []
    return rows(
        names.SCATTER_DIRECTIONS, rank.sharding.scattered, rank.itemsizes.numbers, rank.rank
    )
