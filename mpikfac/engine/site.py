"""Where the parts of K-FAC on one rank stand, and what every part can be asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpikfac.comm import Grid
from mpikfac.engine.nonfinite import Nonfinite
from mpikfac.numerics import Arena
from mpikfac.plan import Layout, RankPlan
from mpikfac.trace import Trace


@dataclass(frozen=True)
class Site:
    """What all parts of K-FAC on one rank share.

    Attributes:
        plan: who does what, where numbers lie and what travels, as this rank sees the plan.
        grid: the communicators.
        dtype: of sums, gradients and directions.
        nonfinite: counts numbers that are not finite.
    """

    plan: RankPlan
    grid: Grid
    trace: Trace
    dtype: torch.dtype
    device: torch.device
    nonfinite: Nonfinite

    def arena(self, layout: Layout, dtype: torch.dtype | None = None) -> Arena:
        """Return an arena of zeros; in the dtype of sums if no other dtype is given."""
        return Arena(layout, dtype or self.dtype, self.device)


class Part:
    """A part of K-FAC on one rank: what it forgets, and what of it is in a state.

    A part without state inherits all methods as they are.
    """

    def forget(self) -> None:
        """Forget everything: statistics, averages and decompositions."""

    def clear(self) -> None:
        """Forget the passes since the last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the state, by name."""
        return {}

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names that all ranks together have in a state of `names`."""
        return set()

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return what this rank takes from a state of `names`, each with a value of its kind."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Take what is `needed` from the state of all ranks, after `forget`.

        Args:
            state: the needed items by name.
            names: names of all items of the state.
        """
