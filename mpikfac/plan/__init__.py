"""Who computes what, where numbers lie and what travels, as plain data: standard library only."""

from __future__ import annotations

from mpikfac.plan.catalogue import NAMED, Named, named
from mpikfac.plan.combinations import STRATEGY, AtLeast, Combination, OneOf, Same, check, shown
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
    check_layers,
    count_of,
    few,
    forward_only,
    usual_rule,
)
from mpikfac.plan.strategy import Refresh, Strategy, Transport, Wires, check_count, divisors, one_of

__all__ = [
    "ALIGNMENT",
    "BETWEEN_NODES",
    "IN_NODE",
    "NAMED",
    "PIECE",
    "PLACE",
    "STRATEGY",
    "AtLeast",
    "Codec",
    "Combination",
    "Factor",
    "FactorShape",
    "Form",
    "LayerShape",
    "Layout",
    "Message",
    "Named",
    "OneOf",
    "Plan",
    "PlannedLayer",
    "RankPlan",
    "Refresh",
    "Same",
    "Shape",
    "Strategy",
    "Transport",
    "Wires",
    "check",
    "check_count",
    "check_layers",
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
    "shown",
    "usual_rule",
]
