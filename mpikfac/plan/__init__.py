"""Who computes what, where numbers lie and what travels, as plain data: standard library only."""

from __future__ import annotations

from mpikfac.plan.catalogue import NAMED, Named, named
from mpikfac.plan.combinations import (
    SOLVERS,
    STRATEGY,
    AtLeast,
    Combination,
    OneOf,
    Same,
    check,
    check_layers,
    shown,
)
from mpikfac.plan.layout import ALIGNMENT, Layout, Shape, lay_out
from mpikfac.plan.messages import PIECE, PLACE, Codec, Message, message, shard_length
from mpikfac.plan.plan import Plan, make_plan
from mpikfac.plan.shapes import (
    BLOCKS,
    FactorShape,
    LayerShape,
    Solver,
    added_to,
    count_of,
    few,
    forward_only,
    parent,
    solvers_of,
    usual_rule,
)
from mpikfac.plan.strategy import Refresh, Strategy, Transport, Wires, check_count, divisors, one_of
from mpikfac.plan.two_levels import BETWEEN_NODES, IN_NODE

__all__ = [
    "ALIGNMENT",
    "BETWEEN_NODES",
    "BLOCKS",
    "IN_NODE",
    "NAMED",
    "PIECE",
    "PLACE",
    "SOLVERS",
    "STRATEGY",
    "AtLeast",
    "Codec",
    "Combination",
    "FactorShape",
    "LayerShape",
    "Layout",
    "Message",
    "Named",
    "OneOf",
    "Plan",
    "Refresh",
    "Same",
    "Shape",
    "Solver",
    "Strategy",
    "Transport",
    "Wires",
    "added_to",
    "check",
    "check_count",
    "check_layers",
    "count_of",
    "divisors",
    "few",
    "forward_only",
    "lay_out",
    "make_plan",
    "message",
    "named",
    "one_of",
    "parent",
    "shard_length",
    "shown",
    "solvers_of",
    "usual_rule",
]
