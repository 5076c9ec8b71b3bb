"""The choices of how training is distributed, as values; their needs; and named values."""

from __future__ import annotations

from mpikfac.plan.choices.axes import axes
from mpikfac.plan.choices.catalogue import NAMED, Named, named
from mpikfac.plan.choices.checks import (
    check_count,
    check_divides,
    check_fraction,
    check_size,
    divisors,
    one_of,
)
from mpikfac.plan.choices.combinations import (
    STRATEGY,
    AtLeast,
    Choices,
    Combination,
    OneOf,
    Same,
    check,
    shown,
)
from mpikfac.plan.choices.distribution import (
    CHANNELS,
    SPLIT,
    Channels,
    Distribution,
    Sliced,
    Split,
    span,
)
from mpikfac.plan.choices.exchange import (
    RULES,
    Asynchrony,
    Exchange,
    MergeRule,
    Outer,
    Robust,
    Stream,
)
from mpikfac.plan.choices.strategy import Refresh, Strategy, Transport, Wires

__all__ = [
    "CHANNELS",
    "NAMED",
    "RULES",
    "SPLIT",
    "STRATEGY",
    "Asynchrony",
    "AtLeast",
    "Channels",
    "Choices",
    "Combination",
    "Distribution",
    "Exchange",
    "MergeRule",
    "Named",
    "OneOf",
    "Outer",
    "Refresh",
    "Robust",
    "Same",
    "Sliced",
    "Split",
    "Strategy",
    "Stream",
    "Transport",
    "Wires",
    "axes",
    "check",
    "check_count",
    "check_divides",
    "check_fraction",
    "check_size",
    "divisors",
    "named",
    "one_of",
    "shown",
    "span",
]
