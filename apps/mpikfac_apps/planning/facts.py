"""What several programs say of a plan: its strategy, its kinds of steps, its orders, its ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mpikfac

ALL_RANKS = 256  # a larger job is judged by SAMPLE of its ranks and the most loaded one
SAMPLE = 64
KINDS_OF_STEP = (
    ("Ordinary step", False, False),
    ("Step with new factors", True, False),
    ("Step with new factors and bases", True, True),
)


def orders_of(factors: Sequence[mpikfac.plan.FactorShape]) -> str:
    """Orders of a side's factors: "64", of many "16 x 9", of blocks "512+513"; "-" for none.

    Of low rank, "64:8" with the eigenvectors that are kept.
    """
    return "+".join(map(order_of, factors)) or "-"


def order_of(factor: mpikfac.plan.FactorShape) -> str:
    """One factor of `orders_of`."""
    order = str(factor.order) if factor.rank is None else f"{factor.order}:{factor.rank}"
    return f"{factor.count} x {order}" if factor.count > 1 else order


def most_loaded(plan: mpikfac.plan.Plan) -> int:
    """The rank with the longest decompositions; 0 if there are none."""
    return max(sorted(set(plan.owners.values())), key=plan.load, default=0)


def looked_at(plan: mpikfac.plan.Plan) -> list[int]:
    """All ranks of a small job; of a large one some, the same each time, and the most loaded."""
    ranks = range(plan.ranks)
    if plan.ranks <= ALL_RANKS:
        return list(ranks)
    # At random: a fixed interval may be a multiple of the columns and meet one of them only.
    return sorted({most_loaded(plan), *random.Random(0).sample(ranks, SAMPLE)})


def near_root(ranks: int) -> int:
    """The divisor whose square is nearest to the number of ranks."""
    return min(mpikfac.plan.divisors(ranks), key=lambda count: abs(count**2 - ranks))


def strategy_of(name: str, ranks: int, solver: str) -> tuple[mpikfac.Strategy, str]:
    """The strategy of that name, and the solver: as asked, but where factors are vectors."""
    if name == "sgd":
        return mpikfac.Strategy.mem_opt(), "inverse"
    workers = {"workers": near_root(ranks)} if name == "hybrid" else {}
    strategy, settings = mpikfac.named(name, ranks, **workers)
    own = settings.get("solver", "inverse")
    return strategy, own if solver == "own" or own == "rank-one" else solver
