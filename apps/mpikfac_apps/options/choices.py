"""The choices of a strategy by key, as options name them, such as "refresh.staleness"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpikfac import Strategy
from mpikfac_apps.options.documents import unknown
from mpikfac_apps.options.fields import Leaf, build, flat, leaves, possible, types_of
from mpikfac_apps.options.sources import OptionSource, belongs, settled


def with_choices(strategy: Strategy, given: Mapping[str, Any]) -> Strategy:
    """Return a strategy with the options in `given`, keyed by names such as "refresh.staleness".

    If `given` changes the type of a joint (an option such as "sync.type", which names a type with
    its own options), the options of the former type are dropped.

    Raises:
        ValueError: the strategy has no such option, or choices cannot be combined.
    """
    sources = [OptionSource(flat(strategy)), OptionSource(given)]
    types, _ = settled(Strategy, sources)
    options = [leaf.key for leaf in leaves(Strategy, types)]
    values = {key: value for source in sources for key, value in source.values.items()}
    for key in values.keys() - {*options}:
        raise ValueError(belongs(Strategy, types, key) or unknown(key, options, possible(Strategy)))
    return build(Strategy, values)


def differences(strategy: Strategy) -> str:
    """Describe a strategy by its assignment and the choices that differ from the defaults."""
    return ", ".join(
        f"{leaf.name}={value}"
        for leaf, value in values_of(strategy)
        if value != leaf.default or leaf.name == "assignment"
    )


def values_of(strategy: Strategy) -> list[tuple[Leaf, Any]]:
    """Return the choices of a strategy with their values; defaults depend on the types chosen."""
    values = flat(strategy)
    return [(leaf, values[leaf.key]) for leaf in leaves(Strategy, types_of(strategy))]
