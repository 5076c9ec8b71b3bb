"""Kronecker factors of one rank: from a batch's sums to averages over ranks and over time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import Grid
from mpikfac.engine.nonfinite import Troubles
from mpikfac.numerics import (
    Arena,
    Parts,
    add_identity,
    add_triangle,
    all_finite,
    not_finite,
    unfold_triangle,
)
from mpikfac.plan import Plan, count_of, parent

STAGE = "reduce statistics"
FORMS = "factors", "vectors"  # what averages are called in the state; the second are vectors


class Factors:
    """The factors that one rank keeps.

    An example has the same weight wherever it is: a batch's factors are sums over examples, which
    ranks add up as they add up their numbers, and averages over time weigh batches by these. A
    layer that took no part in a batch keeps its average.

    Averages over time and over ranks commute: where the plan is `late`, each rank averages over
    time what its own share of the batches gives, and the averages of all ranks make up the factors
    whenever these are asked for.

    Attributes:
        statistics: this rank's sums of a batch, as triangles or, where factors are squares of
            vectors, these vectors, and numbers of examples; zero between steps.
        parts: the same for each part of a share, where a batch is dealt out in parts.
        averages: running averages, in the same form; at first the identity (or zero vectors).
        weights: numbers of examples that they stand for; at first 0.
        started: whether there are averages of anything.
        lacking: whether there are none of something, for which the next batch has to count.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        dtype: torch.dtype,
        kept_in: torch.dtype,
        device: torch.device,
        troubles: Troubles,
    ) -> None:
        """Sums have `dtype`, averages the one that they are `kept_in`."""
        self.plan, self.grid, self.troubles = plan, grid, troubles
        rank = grid.world.rank
        self.statistics = Arena(plan.statistics(rank), dtype, device)
        self.parts = Parts(self.statistics, plan.parts_per_rank)
        self.averages = Arena(plan.averages(rank), kept_in, device)
        weights = torch.zeros(len(self.averages), dtype=dtype, device=device)
        self.weights = dict(zip(self.averages, weights.split(1)))
        self._squares = Arena(plan.squares(rank), dtype, device)
        self._messages = {share: plan.reduce_statistics(rank, share) for share in plan.shares}
        self._beside = None
        if plan.strategy.transport.overlap and not plan.late and (messages := self._messages[None]):
            layout, flat = self.statistics.layout, self.statistics.flat
            self._beside = grid.beside(messages, layout, flat, urgency=1)
        self._unsettled: tuple[float, int] | None = None

    def forget(self, identity: bool) -> None:
        """No averages, or the identity as the average so far, with the weight of a batch."""
        self.settle()
        self.parts.clear()
        self.statistics.flat.zero_()
        self.averages.flat.zero_()
        for name, average in self.averages.items():
            self.weights[name].zero_()
            if not self._is_vector(name):
                add_identity(average)
        self.started = self._identity = identity
        self.lacking = not identity

    def unscale(self, names: Collection[str], scale: float) -> bool:
        """Takes a loss's scale out of a batch's sums of gradients; whether all sums are finite.

        Collective over: none.
        """
        collected = self.parts.collected
        for name in names:
            sums = collected[..., self.statistics.span(name)]
            sums /= scale
            if not self._is_vector(name):  # twice, as the square may be no number of this dtype
                sums /= scale
        return all_finite(collected)

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
            for factor in self.plan.shapes[layer].factors:
                self._beside.ready(factor.name)
                self._beside.ready(count_of(factor.name))

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
        self._merge(decay)
        self.statistics.flat.zero_()
        self.started, self.lacking = True, False

    def whole(self, share: int | None = None) -> Mapping[str, Tensor]:
        """Averages over ranks and time of the factors that this rank decomposes.

        Where the plan is late, of a `share` of the layers if not of all, and until `discard`.

        Collective over: world.
        """
        self.settle()
        if not self.plan.late:
            return self.averages
        for name, weight in self.weights.items():
            torch.mul(self.averages[name], weight, out=self.statistics[name])
            self.statistics[count_of(name)].copy_(weight)
        self._sum(share)
        for name in self.averages:
            weight = self.statistics[count_of(name)]
            self.statistics[name].div_(torch.where(weight > 0, weight, 1))
            if not self._is_vector(name):
                add_identity(self.statistics[name], (weight == 0).to(weight))
        return self.statistics

    def discard(self) -> None:
        """Makes room for the next batch's statistics, where `whole` has put averages there."""
        if self.plan.late:
            self.statistics.flat.zero_()

    def kept(self) -> list[str]:
        """Factors that this rank answers for: all that it keeps, or where late those it owns."""
        if not self.plan.late:
            return list(self.averages)
        rank = self.grid.world.rank
        return [name for name in self.averages if self.plan.owners[name] == rank]

    def items(self, factors: Collection[str]) -> dict[str, Tensor]:
        """Of these, averages that this rank answers for, and weights, by the names of the state."""
        kept = [name for name in self.kept() if name in factors]
        found = {self._item(name): self.averages[name] for name in kept}
        return found | {f"weights/{name}": self.weights[name] for name in kept}

    def state_dict(self) -> dict[str, Any]:
        """Averages over ranks and their weights, by name.

        Where the plan is late, it moves them all to their owners first, here as after a restart:
        a run that goes on from it and one that wrote it stay equal.

        Collective over: world where the plan is late or overlaps, else none.
        """
        self.settle()
        if self.plan.late and self.started:
            whole = self.whole()
            for name, average in self.averages.items():
                mine = name in self.kept()
                average.copy_(whole[name]) if mine else average.zero_()
                self.weights[name].copy_(whole[count_of(name)] * mine)
            self.discard()
        return {"started": 1, **self.items(self.plan.factors)} if self.started else {}

    def complete(self, names: Collection[str]) -> set[str]:
        """Names of what all ranks together have in a state of `names`."""
        factors = self.plan.factors if "started" in names else ()
        return {item for name in factors for item in (self._item(name), f"weights/{name}")}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """What this rank takes from a state of `names`; each with a value of its kind."""
        return self.items(self._taken(names))

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Takes what is `needed` from the state of all, after `forget`.

        Also where this rank keeps none of them: it takes part in what all ranks do with theirs.
        """
        if taken := self._taken(names):
            self.started = True
            self.lacking = self.lacking and len(taken) < len(self.plan.factors)
            for name, value in self.items(taken).items():
                value.copy_(state[name])

    def _taken(self, names: Collection[str]) -> list[str]:
        """Factors whose averages come from a state of `names`; not those of another form there."""
        if not {name.partition("/")[0] for name in names}.intersection(FORMS):
            return []
        other = {name: FORMS[not self._is_vector(name)] for name in self.plan.factors}
        return [name for name, form in other.items() if f"{form}/{name}" not in names]

    def _is_vector(self, factor: str) -> bool:
        return parent(factor) in self.plan.vectors

    def _item(self, factor: str) -> str:
        """What its average is called in the state."""
        return f"{FORMS[self._is_vector(factor)]}/{factor}"

    def finish(self) -> None:
        """Sends what the backward pass did not come by, where statistics are sent by layer."""
        if self._beside is None:
            return
        for name, layer in self.plan.shapes.items():
            if layer.factors[0].name not in self._beside.ready_blocks:
                self.ready(name)

    def _merge(self, decay: float) -> None:
        """Takes the sums over a batch into the averages, weighed by their numbers of examples."""
        for name, weight in self.weights.items():
            count = self.statistics[count_of(name)]
            if self._identity:  # it weighs as much as the first batch
                weight.copy_(torch.where(weight > 0, weight, count))
            merge(self.averages[name], weight, self.statistics[name], count, decay)

    def _sum(self, share: int | None) -> None:
        """Adds up the statistics of all ranks."""
        messages = self._messages[share]
        if not self._squares:
            self.grid.exchange(messages, self.statistics.flat)
        elif messages:
            with self.grid.trace.stage(STAGE):
                for name, square in self._squares.items():
                    one = self.statistics[name]
                    square.copy_(unfold_triangle(one) if name in self.plan.factors else one)
            self.grid.exchange(messages, self._squares.flat)
            with self.grid.trace.stage(STAGE):
                self.statistics.flat.zero_()
                for name, square in self._squares.items():
                    add = add_triangle if name in self.plan.factors else Tensor.add_
                    add(self.statistics[name], square)

    def _check(self, step: int) -> None:
        """Factors of this batch that are not finite count for nothing."""
        broken = leave_out_broken(self.statistics, self.averages)
        rank, owners = self.grid.world.rank, self.plan.owners
        mine = [name for name in broken if self.plan.late or owners[name] == rank]
        self.troubles.note("statistics", mine, step, "their averages stay as they are")


def leave_out_broken(sums: Arena, names: Iterable[str]) -> list[str]:
    """Those of a batch's sums that are not finite; they and their counts become 0."""
    if all_finite(sums.flat):
        return []
    broken = not_finite({name: sums[name] for name in names})
    for name in broken:
        sums[name].zero_()
        sums[count_of(name)].zero_()
    return broken


def merge(average: Tensor, weight: Tensor, total: Tensor, count: Tensor, decay: float) -> None:
    """Takes a batch's sum `total` into a running average, weighed by its number of examples.

    Args:
        weight: `[1]`, the number that the average stands for, which follows.
        total: becomes the batch's mean.
        count: `[1]`, the batch's number of examples; the average stays where it is 0.
    """
    weight.mul_(decay).add_(count, alpha=1 - decay)
    mean = total.div_(torch.where(count > 0, count, 1))
    precise = average.to(mean.dtype)  # itself if it has that dtype
    precise.lerp_(mean, torch.where(count > 0, (1 - decay) * count / weight, 0))
    average.copy_(precise)
