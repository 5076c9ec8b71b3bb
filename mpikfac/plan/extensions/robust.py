"""The messages of robust rules, which combine whole vectors of all ranks."""

from __future__ import annotations

from mpikfac.plan import names
from mpikfac.plan.layout import Layout
from mpikfac.plan.messages import Message, NearMost, combinations
from mpikfac.plan.of_rank import RankPlan, Stage
from mpikfac.plan.stages import summed


def replaced(rank: RankPlan) -> dict[str, Stage]:
    """Return the stages in which a rule takes the place of a sum."""
    rules, functions = rank.strategy.exchange.robust, dict[str, Stage]()
    if rules.combine_factors == "near":
        functions[names.REDUCE_STATISTICS] = combine_statistics
    if rules.combine != "mean":
        functions[names.REDUCE_GRADIENTS] = combine_gradients
    return functions


def combine_statistics(rank: RankPlan, turn: int | None) -> list[Message]:
    """Return the messages that add up the factors of ranks with factors near most ranks'."""
    layout = rank.layouts.statistics
    factors = [factor for factor in rank.factors if turn in (None, factor.turn)]
    kinds = {name: 0 for factor in factors for name in (factor.name, factor.counted)}
    rule = NearMost(
        rank.strategy.exchange.robust.safe_factor,
        tuple((*layout.place(f.name), layout.offsets[f.counted]) for f in factors),
    )
    members, itemsize = (rank.grid.count, rank.rank), rank.itemsizes.numbers
    return combinations(names.REDUCE_STATISTICS, layout, kinds.get, *members, itemsize, rule)


def combine_gradients(rank: RankPlan, _turn: int | None = None) -> list[Message]:
    """Return the messages that combine the gradients of ranks."""
    return combine(rank, names.REDUCE_GRADIENTS, rank.layouts.gradients)


def combine(rank: RankPlan, stage: str, layout: Layout) -> list[Message]:
    """Return the messages of a robust rule, and the sums of the tensors to average."""
    means = dict.fromkeys(rank.means, 0)
    trained = dict.fromkeys(layout.shapes.keys() - means.keys(), 0)
    members, itemsize = (rank.grid.count, rank.rank), rank.itemsizes.numbers
    rule = rank.strategy.exchange.robust
    combined = combinations(stage, layout, trained.get, *members, itemsize, rule)
    return combined + summed(rank, stage, layout, means)
