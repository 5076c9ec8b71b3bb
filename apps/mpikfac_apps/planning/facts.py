"""What several programs need to describe a plan: strategy, kinds of steps, orders, ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import mpikfac
from mpikfac.preconditioners import Inverse, Preconditioner, named_preconditioner

ALL_RANKS = 256  # a larger job is represented by SAMPLE ranks and the most loaded rank
SAMPLE = 64
UNPLANNED = ("split_layers", "tp_size")  # options that need the sizes of a network's calls
FIRST_ORDER = "sgd"
"""The name of the strategy without K-FAC, plain data parallelism, for planning and predictions."""
KINDS_OF_STEP = (
    ("Ordinary step", False, False),
    ("Step with new factors", True, False),
    ("Step with new factors and bases", True, True),
)


def orders_of(factors: Sequence[mpikfac.plan.FactorShape]) -> str:
    """Describe the orders of a side's factors, "-" for no factors.

    A factor of order 64 is "64"; 16 factors of order 9 are "16 x 9"; blocks are "512+513"; and
    "64:8" is a low-rank factor, of which 8 eigenvectors are kept.
    """
    return "+".join(map(order_of, factors)) or "-"


def order_of(factor: mpikfac.plan.FactorShape) -> str:
    """Describe a single factor for `orders_of`."""
    order = str(factor.order) if factor.rank is None else f"{factor.order}:{factor.rank}"
    return f"{factor.count} x {order}" if factor.count > 1 else order


def most_loaded(plan: mpikfac.plan.Plan) -> int:
    """Return the rank with the most work in decompositions; 0 if no layer is covered."""
    return max(sorted(set(plan.owners.values())), key=plan.load, default=0)


def looked_at(plan: mpikfac.plan.Plan) -> list[int]:
    """Return the ranks to examine: all, or in a large job a sample and the most loaded rank."""
    ranks = range(plan.ranks)
    if plan.ranks <= ALL_RANKS:
        return list(ranks)
    # The sample is random: evenly spaced ranks could all be in the same column.
    return sorted({most_loaded(plan), *random.Random(0).sample(ranks, SAMPLE)})


def near_root(ranks: int) -> int:
    """Return the divisor of `ranks` whose square is nearest to `ranks`."""
    return min(mpikfac.plan.divisors(ranks), key=lambda count: abs(count**2 - ranks))


def at_ranks(strategy: mpikfac.Strategy, ranks: int) -> mpikfac.Strategy:
    """Return HYBRID-OPT with about as many workers as columns, and other strategies unchanged.

    By default, half of the ranks are workers, which needs an even number of ranks.
    """
    if strategy.assignment != mpikfac.HybridOpt():
        return strategy
    return replace(strategy, assignment=mpikfac.HybridOpt(grad_workers=near_root(ranks)))


def strategy_of(
    name: str, ranks: int, preconditioner: Preconditioner | None
) -> tuple[mpikfac.Strategy, Preconditioner]:
    """Return a named strategy, and the preconditioner to use with it.

    "sgd" is training without K-FAC.

    Args:
        preconditioner: the preconditioner, unless the strategy needs its own, as Eva does; None for
            the strategy's own preconditioner.
    """
    if name == "sgd":
        return mpikfac.Strategy(mpikfac.MemOpt()), Inverse()
    strategy, settings = mpikfac.get_strategy(name)
    usual = named_preconditioner(settings.get("preconditioner", "inverse"))
    if preconditioner is None or usual.form.vector:
        preconditioner = usual
    return at_ranks(strategy, ranks), preconditioner
