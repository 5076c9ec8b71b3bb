"""Who computes what, where numbers lie and what travels, as plain data: standard library only."""

from __future__ import annotations

from mpikfac.plan.catalogue import NAMED, Named, named
from mpikfac.plan.layout import ALIGNMENT, Layout, Shape, lay_out
from mpikfac.plan.messages import (
    BETWEEN_NODES,
    IN_NODE,
    PIECE,
    PLACE,
    Codec,
    Message,
    message,
    shard_length,
)
from mpikfac.plan.plan import Plan, plan_for
from mpikfac.plan.rank import RankPlan
from mpikfac.plan.roles import Factor, PlannedLayer
from mpikfac.plan.shapes import (
    FactorShape,
    Form,
    LayerShape,
    count_of,
    few,
    forward_only,
    solvers_of,
    usual_rule,
)
from mpikfac.plan.strategy import Strategy, check_count, divisors, one_of

__all__ = [
    "ALIGNMENT",
    "BETWEEN_NODES",
    "IN_NODE",
    "NAMED",
    "PIECE",
    "PLACE",
    "Codec",
    "Factor",
    "FactorShape",
    "Form",
    "LayerShape",
    "Layout",
    "Message",
    "Named",
    "Plan",
    "PlannedLayer",
    "RankPlan",
    "Shape",
    "Strategy",
    "check_count",
    "count_of",
    "divisors",
    "few",
    "forward_only",
    "lay_out",
    "message",
    "named",
    "one_of",
    "plan_for",
    "shard_length",
    "solvers_of",
    "usual_rule",
]
