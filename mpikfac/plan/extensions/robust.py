"""The messages of robust rules, which combine whole vectors of all ranks."""

from __future__ import annotations

from mpikfac.plan import names
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import Message, combinations
from mpikfac.plan.of_rank import RankPlan, Stage
from mpikfac.plan.stages import reduce_gradients, summed


def replaced(rank: RankPlan) -> dict[str, Stage]:
    """Return the stages in which a rule replaces a sum."""
    sync, functions = rank.strategy.sync, dict[str, Stage]()
    if not sync.factor_aggregation.sums:
        functions[names.REDUCE_STATISTICS] = combine_statistics
    if not sync.aggregation.sums:
        functions[names.REDUCE_GRADIENTS] = combine_gradients
    return functions


def combine_statistics(rank: RankPlan, turn: int | None) -> list[Message]:
    """Return the messages that sum factors over the ranks with factors near those of most ranks."""
    layout = rank.layouts.statistics
    factors = [factor for factor in rank.factors if turn in (None, factor.turn)]
    kinds = {name: 0 for factor in factors for name in (factor.name, factor.counted)}
    blocks = tuple((*layout.place(f.name), layout.offsets[f.counted]) for f in factors)
    rule = rank.strategy.sync.factor_aggregation.of_factors(blocks)
    members, itemsize = (rank.grid.count, rank.rank), rank.itemsizes.numbers
    return combinations(names.REDUCE_STATISTICS, layout, kinds.get, *members, itemsize, rule)


def combine_gradients(rank: RankPlan, _turn: int | None = None) -> list[Message]:
    """Return the messages that combine the ranks' gradients."""
    return combine(rank, names.REDUCE_GRADIENTS, rank.layouts.gradients)


def combine(rank: RankPlan, stage: str, layout: Layout) -> list[Message]:
    """Return a robust rule's messages, and the reductions of the tensors to average."""
    means = dict.fromkeys(rank.means, 0)
    trained = dict.fromkeys(layout.shapes.keys() - means.keys(), 0)
    members, itemsize = (rank.grid.count, rank.rank), rank.itemsizes.numbers
    rule = rank.strategy.sync.aggregation
    combined = combinations(stage, layout, trained.get, *members, itemsize, rule)
    return combined + summed(rank, stage, layout, means)


def dealt(rank: RankPlan) -> list[Message]:
    """Return the messages that distribute vectors for a rule, which has a memory per stage."""
    sync = rank.strategy.sync
    gradients = reduce_gradients(rank) if sync.averages_gradients else []
    vectors = [m for m in gradients + sync.messages(rank) if m.rule]
    return [message for message in vectors if message.primitive == "Alltoall"]


def shards(rank: RankPlan) -> int:
    """Return the number of elements in the rank's shards of all vectors that a rule combines."""
    spans = (message.spans[rank.rank] for message in dealt(rank))
    return sum(stop - start for start, stop in spans)
