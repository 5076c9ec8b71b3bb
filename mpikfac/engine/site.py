"""The site of the parts of K-FAC on a rank, and the methods of every part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import Grid, handed_over
from mpikfac.engine.nonfinite import Flags, Nonfinite
from mpikfac.numerics import Arena
from mpikfac.plan import Layout, RankPlan
from mpikfac.trace import Trace


@dataclass(frozen=True)
class Site:
    """The values that all parts of K-FAC on a rank share.

    Attributes:
        plan: roles, layouts and messages, as the rank sees the plan.
        grid: the communicators.
        dtype: of sums, gradients and directions.
        nonfinite: the counter of numbers that are not finite.
        flags: facts on the device that the host reads together.
    """

    plan: RankPlan
    grid: Grid
    trace: Trace
    dtype: torch.dtype
    device: torch.device
    nonfinite: Nonfinite
    flags: Flags

    def arena(self, layout: Layout, dtype: torch.dtype | None = None) -> Arena:
        """Return an arena of zeros, by default in the dtype of sums."""
        return Arena(layout, dtype or self.dtype, self.device)


def take_over(before: Mapping[str, Tensor], after: Mapping[str, Tensor], grid: Grid) -> set[str]:
    """Copy tensors that keep name and shape, also from other ranks; return the names.

    Collective over: world.
    """
    found = dict(before) | handed_over(grid.world, before, after.keys() - before.keys())
    kept = {n for n, tensor in after.items() if n in found and found[n].shape == tensor.shape}
    for name in kept:
        after[name].copy_(found[name])
    return kept


class Part:
    """A part of K-FAC on a rank, with statistics to forget and items of the state.

    A part without state inherits the methods below.
    """

    def forget(self) -> None:
        """Forget everything: statistics, averages and decompositions."""

    def clear(self) -> None:
        """Forget the passes since the last step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's share of the state, by name."""
        return {}

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state of all ranks, as far as `names` tell."""
        return set()

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with values of the expected kind."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `forget`.

        Args:
            state: the needed items by name.
            names: names of all items of the state.
        """
