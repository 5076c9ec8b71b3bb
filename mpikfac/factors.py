"""Kronecker factors of one rank: from a batch's sums to averages over ranks and over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac import kron
from mpikfac.arena import Arena, Parts
from mpikfac.comm import Grid
from mpikfac.plan import Plan
from mpikfac.troubles import Troubles, all_finite, not_finite

STAGE = "reduce statistics"


class Factors:
    """The factors that one rank keeps.

    Averages over time and over ranks commute: where the plan is `late`, each rank averages over
    time what its own share of the batches gives, and the averages of all ranks add up to the
    factors whenever these are asked for.

    Attributes:
        statistics: this rank's part of a batch's factors, as triangles or, where factors are
            squares of vectors, these vectors; zero between steps.
        parts: the same for each part of a share, where a batch is dealt out in parts.
        averages: running averages, in the same form.
        kind: what items of the state are called: "factors" or "vectors".
        weight: what the averages' weights add up to; 0 if there are none yet.
    """

    def __init__(
        self, plan: Plan, grid: Grid, dtype: torch.dtype, device: torch.device, troubles: Troubles
    ) -> None:
        self.plan, self.grid, self.troubles = plan, grid, troubles
        rank = grid.world.rank
        self.statistics = Arena(plan.statistics(rank), dtype, device)
        self.parts = Parts(self.statistics, plan.parts_per_rank)
        self.averages = Arena(plan.averages(rank), dtype, device)
        self._squares = Arena(plan.squares(rank), dtype, device)
        self._messages = {share: plan.reduce_statistics(rank, share) for share in plan.shares}
        self.kind = "vectors" if plan.vectors else "factors"
        self.weight = 0.0
        self._beside = None
        if plan.strategy.overlap and not plan.late and (messages := self._messages[None]):
            layout, flat = self.statistics.layout, self.statistics.flat
            self._beside = grid.beside(messages, layout, flat, urgency=1)
        self._unsettled: tuple[float, int] | None = None

    def forget(self, identity: bool) -> None:
        """No averages, or the identity as the average so far."""
        self.settle()
        self.parts.clear()
        self.statistics.flat.zero_()
        self.averages.flat.zero_()
        self.weight = 1.0 if identity else 0.0
        for name in self.kept() if identity else ():
            kron.add_identity(self.averages[name])

    def average(self, decay: float, step: int) -> None:
        """Takes a batch's factors into the averages; those on their way, when they are asked for.

        Collective over: world.
        """
        self._unsettled = decay, step
        if self._beside is None:
            self.settle()

    def ready(self, layer: str) -> None:
        """A layer's statistics are there: sends them, where there is `overlap`.

        Collective over: none.
        """
        if self._beside is not None:
            for name in (f"{layer}.A", f"{layer}.G"):
                self._beside.ready(name)

    @property
    def overlap(self) -> bool:
        """Whether statistics are sent layer by layer, beside the computation."""
        return self._beside is not None

    @property
    def settled(self) -> bool:
        """Whether the averages are those of all batches so far."""
        return self._unsettled is None

    def settle(self) -> None:
        """Waits for a batch's factors that are on their way, and takes them into the averages.

        Collective over: world.
        """
        if self._unsettled is None:
            return
        (decay, step), self._unsettled = self._unsettled, None
        if self._beside is not None:
            self._beside.wait()
        elif self.parts:
            self.grid.sum_in_order(self.parts.take(), self.statistics.flat, STAGE)
        elif not self.plan.late:
            self._sum(None)
        self._check(step)
        self.weight = decay * self.weight + 1 - decay
        self.averages.flat.lerp_(self._own(), (1 - decay) / self.weight)
        self.statistics.flat.zero_()

    def whole(self, share: int | None = None) -> Mapping[str, Tensor]:
        """Averages over ranks and time of the factors that this rank decomposes.

        Where the plan is late, of a `share` of the layers if not of all, and until `discard`.

        Collective over: world.
        """
        self.settle()
        if not self.plan.late:
            return self.averages
        self.statistics.flat.copy_(self.averages.flat)
        self._sum(share)
        return self.statistics

    def discard(self) -> None:
        """Makes room for the next batch's statistics, where `whole` has put averages there."""
        if self.plan.late:
            self.statistics.flat.zero_()

    def kept(self) -> list[str]:
        """Factors that this rank answers for: all that it keeps, or where late those it owns."""
        if not self.plan.late:
            return list(self.averages)
        return [name for name, owner in self.plan.owners.items() if owner == self.grid.world.rank]

    def state_dict(self) -> dict[str, Any]:
        """The averages' weight, and averages over ranks by name.

        Where the plan is late, it moves them all to their owners first, here as after a restart:
        a run that goes on from it and one that wrote it stay equal.

        Collective over: world where the plan is late or overlaps, else none.
        """
        self.settle()
        if self.plan.late and self.weight:
            whole = self.whole()
            owned = {name: whole[name].clone() for name in self.kept()}
            self.averages.flat.zero_()
            for name, average in owned.items():
                self.averages[name].copy_(average)
            self.discard()
        state: dict[str, Any] = {f"{self.kind}/{n}": self.averages[n] for n in self.kept()}
        return state | {"average_weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what this rank keeps from the state of all, after `forget`."""
        self.weight = float(state["average_weight"])
        self.averages.flat.zero_()
        for name in self.kept():
            self.averages[name].copy_(state[f"{self.kind}/{name}"])

    def _own(self) -> Tensor:
        """The statistics of the factors that this rank keeps averages of."""
        to_owners = self.plan.strategy.reduction == "owners" and not self.plan.late
        return self.statistics.segment(self.grid.world.rank) if to_owners else self.statistics.flat

    def _sum(self, share: int | None) -> None:
        """Adds up the statistics of all ranks."""
        messages = self._messages[share]
        if not self._squares:
            self.grid.exchange(messages, self.statistics.flat)
        elif messages:
            with self.grid.trace.stage(STAGE):
                for name, square in self._squares.items():
                    square.copy_(kron.unfold_triangle(self.statistics[name]))
            self.grid.exchange(messages, self._squares.flat)
            with self.grid.trace.stage(STAGE):
                self.statistics.flat.zero_()
                for name, square in self._squares.items():
                    kron.add_triangle(self.statistics[name], square)

    def _check(self, step: int) -> None:
        """Factors of this batch that are not finite become their averages.

        Where there are none yet, they become the identity; vectors become 0, as none stands for it.
        """
        broken: list[str] = []
        if not all_finite(self.statistics.flat):
            broken = not_finite({name: self.statistics[name] for name in self.averages})
        for name in broken:
            self.statistics[name].copy_(self.averages[name])
            answers = not self.plan.late or name in self.kept()
            if self.weight == 0 and answers and not self.plan.vectors:
                kron.add_identity(self.statistics[name])
        rank, owners = self.grid.world.rank, self.plan.owners
        mine = [name for name in broken if self.plan.late or owners[name] == rank]
        self.troubles.note("statistics", mine, step, "their averages stay as they are")
