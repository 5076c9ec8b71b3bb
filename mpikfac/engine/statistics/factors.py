"""Kronecker factors on a rank: from a batch's sums to averages over ranks and over time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import summed
from mpikfac.engine.nonfinite import Flags
from mpikfac.engine.site import Part, Site, take_over
from mpikfac.numerics import (
    Arena,
    Parts,
    add_identity,
    add_triangle,
    all_finite,
    copy_all,
    each_finite,
    unfold_triangle,
)
from mpikfac.plan import Factor

STAGE = "reduce statistics"
FORMS = {"matrix": "factors", "vector": "vectors"}  # names of averages in the state, by form


@dataclass(frozen=True)
class Running:
    """A running average, and a batch's sum beside the average; all are views of arenas.

    Attributes:
        total: the batch's sum over examples.
        count: `[1]`, the number of examples in the sum.
        weight: `[1]`, the number of examples in the average.
    """

    name: str
    total: Tensor
    count: Tensor
    average: Tensor
    weight: Tensor


def merge(running: Sequence[Running], decay: float) -> None:
    """Take the batch's sums into the averages, weighed by the numbers of examples.

    A sum becomes the batch's mean. With a count of 0, the average does not change.
    """
    if not running:
        return
    counts = torch.cat([one.count for one in running])
    weights = decay * torch.cat([one.weight for one in running]) + (1 - decay) * counts
    copy_all(zip([one.weight for one in running], weights.split(1)))
    shares = torch.where(counts > 0, (1 - decay) * counts / weights, 0).split(1)
    for one, count, share in zip(running, torch.where(counts > 0, counts, 1).split(1), shares):
        mean = one.total.div_(count)
        precise = one.average.to(mean.dtype)  # the average itself if dtypes are the same
        one.average.copy_(precise.lerp_(mean, share))


def leave_out_broken(
    flat: Tensor, running: Sequence[Running], flags: Flags, tell: Callable[[list[str]], None]
) -> None:
    """Set sums with NaN or infinity to 0, and their counts; `tell` hears the names.

    Args:
        flat: the buffer of all sums.
        flags: tells names later, so that the host need not wait now.
    """
    if not running or (flat.is_cpu and all_finite(flat)):
        tell([])
        return
    sound = each_finite([one.total for one in running])
    torch._foreach_mul_([one.count for one in running], list(sound.to(flat.dtype).split(1)))
    flat.nan_to_num_(0.0, 0.0, 0.0)
    names = [one.name for one in running]
    flags.keep(sound, lambda kept: tell([name for name, one in zip(names, kept) if not one]))


class Factors(Part):
    """The factors on a rank.

    An example has the same weight on every rank: a batch's factors are sums over examples, ranks
    add up sums and numbers of examples, and averages over time weigh batches by numbers of
    examples. A layer without examples in a batch keeps the average.

    Averages over time and over ranks commute. If the plan is `late`, every rank averages the rank's
    own share of the batches over time, and a call of `whole` sums the averages over ranks.

    Attributes:
        statistics: the rank's sums of a batch and numbers of examples, zero between steps. Sums are
            triangles, or vectors, with the factors as the vectors' squares.
        parts: statistics of every part of a share, if a batch is dealt out in parts.
        averages: running averages, in the same form; at first the identity (or zero vectors).
        weights: numbers of examples in the averages; at first 0.
        started: whether any average has begun.
        lacking: whether an average is missing, and the next batch has to count.
        overlap: whether statistics are sent layer by layer, overlapped with the computation.
    """

    def __init__(self, site: Site, kept_in: torch.dtype, identity: bool = False) -> None:
        """Make arenas of zeros.

        Args:
            kept_in: dtype of averages.
            identity: averages start at the identity, with the weight of a batch.
        """
        self.site, self.plan, self.grid = site, site.plan, site.grid
        layouts = self.plan.layouts
        self.statistics = site.arena(layouts.statistics)
        self.parts = Parts(self.statistics, self.plan.parts)
        self.averages = site.arena(layouts.averages, kept_in)
        weights = torch.zeros(len(self.averages), dtype=site.dtype, device=site.device)
        self.weights = dict(zip(self.averages, weights.split(1)))
        self._factors = {factor.name: factor for factor in self.plan.factors}
        self._running = {name: self._bound(self._factors[name]) for name in self.averages}
        self._squares = site.arena(layouts.squares)
        self._messages = {s: self.plan.reduce_statistics(s) for s in self.plan.shares}
        self._of_layer = {layer.name: layer.factors for layer in self.plan.layers}
        self._beside = None
        overlap = self.plan.strategy.transport.overlap and not self.plan.late
        if overlap and (messages := self._messages[None]):
            layout, flat = self.statistics.layout, self.statistics.flat
            self._beside = self.grid.overlapped(messages, layout, flat, urgency=1)
        self.overlap = self._beside is not None
        self._unsettled: tuple[float, int] | None = None
        self._starts_at_identity = identity

    def _bound(self, factor: Factor) -> Running:
        name = factor.name
        total, count = self.statistics[name], self.statistics[factor.counted]
        return Running(name, total, count, self.averages[name], self.weights[name])

    def recall(self) -> None:
        """Forget what overlapped messages have sent of a batch without a step.

        Collective over: world.
        """
        self.settle()
        if self._beside is not None:
            self._beside.drop(self.grid.world)

    def forget(self) -> None:
        """Forget all averages, or start at the identity with the weight of a batch."""
        self.settle()
        self.parts.clear()
        self.statistics.flat.zero_()
        self.averages.flat.zero_()
        for name, average in self.averages.items():
            self.weights[name].zero_()
            if not self._factors[name].solver.vector:
                add_identity(average)
        self.started = self._starts_at_identity
        # Averages whose identity weighs as much as the rank's first batch.
        self._at_identity = list(self._running.values()) if self._starts_at_identity else []
        self.lacking = not self._starts_at_identity

    def clear(self) -> None:
        """Forget the collected parts of a batch."""
        self.parts.clear()

    def collect(self) -> None:
        """Keep the sums of a part of the rank's share, and make room for the next part."""
        self.parts.add()
        self.statistics.flat.zero_()

    def unscale(self, names: Collection[str], scale: float) -> bool:
        """Take a loss's scale out of a batch's sums of gradients; return whether sums are finite.

        Collective over: none.
        """
        collected = self.parts.collected
        for name in names:
            sums = collected[..., self.statistics.span(name)]
            sums /= scale
            # Twice, as the square of the scale may be no number of this dtype.
            if not self._factors[name].solver.vector:
                sums /= scale
        return all_finite(collected)

    def average(self, decay: float, step: int) -> None:
        """Take a batch's factors into the averages; overlapped factors at the next `settle`.

        Collective over: world.
        """
        self._unsettled = decay, step
        if self._beside is None:
            self.settle()

    def ready(self, layer: str) -> None:
        """Send a layer's complete statistics, if statistics are overlapped.

        Collective over: none.
        """
        if self._beside is not None:
            for factor in self._of_layer[layer]:
                self._beside.ready(factor.name)
                self._beside.ready(factor.counted)

    @property
    def settled(self) -> bool:
        """Whether the averages have all batches so far."""
        return self._unsettled is None

    def settle(self) -> None:
        """Wait for a batch's unfinished messages, and take the factors into the averages.

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

    def whole(self, share: int | None = None) -> Arena:
        """Return averages over ranks and time of the factors to decompose on the rank.

        If the plan is late, averages of a `share` of the layers, valid until `discard`.

        Collective over: world.
        """
        self.settle()
        if not self.plan.late:
            return self.averages
        for one in self._running.values():
            torch.mul(one.average, one.weight, out=one.total)
            one.count.copy_(one.weight)
        self._sum(share)
        for name, one in self._running.items():
            one.total.div_(torch.where(one.count > 0, one.count, 1))
            if not self._factors[name].solver.vector:
                add_identity(one.total, (one.count == 0).to(one.count))
        return self.statistics

    def take_over(self, before: Factors) -> None:
        """Take over the averages of layers that have the same factors as before.

        Collective over: world.
        """
        kept = take_over(before.averages, self.averages, self.grid)
        take_over(before.weights, self.weights, self.grid)
        begun = kept - {one.name for one in before._at_identity}
        self._at_identity = [one for one in self._at_identity if one.name not in begun]
        self.started = before.started
        (new,) = summed(self.grid.world, [len(self.averages) - len(kept)])
        self.lacking = before.lacking or new > 0  # on all ranks alike

    def discard(self) -> None:
        """Make room for the next batch's statistics, if `whole` has used the room."""
        if self.plan.late:
            self.statistics.flat.zero_()

    def finish(self) -> None:
        """Send statistics of layers without a backward pass, if statistics are overlapped."""
        if self._beside is None:
            return
        for name, factors in self._of_layer.items():
            if factors[0].name not in self._beside.ready_blocks:
                self.ready(name)

    # -- state -----------------------------------------------------------------------------------

    def items(self, factors: Iterable[Factor]) -> dict[str, Tensor]:
        """Return the averages and weights to save on the rank, among `factors`, by state names."""
        kept = [factor for factor in factors if self._saves(factor)]
        found = {_item(factor): self.averages[factor.name] for factor in kept}
        return found | {f"weights/{one.name}": self.weights[one.name] for one in kept}

    def state_dict(self) -> dict[str, Any]:
        """Return averages over ranks, and weights, by name.

        With reduce_at="bases", averages first move to the owners, as in a restart: the continued
        run and a resumed run stay identical.

        Collective over: world where the plan is late or overlaps, else none.
        """
        self.settle()
        if self.plan.late and self.started:
            self.whole()
            for name, one in self._running.items():
                mine = self._saves(self._factors[name])
                one.average.copy_(one.total) if mine else one.average.zero_()
                one.weight.copy_(one.count * mine)
            self._leave_identity_to_owners()
            self.discard()
        return {"started": 1, **self.items(self.plan.factors)} if self.started else {}

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state of all ranks, as far as `names` tell."""
        factors = self.plan.factors if "started" in names else ()
        return {item for one in factors for item in (_item(one), f"weights/{one.name}")}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with values of the expected kind.

        Raises:
            ValueError: the state has nothing of a factor.
        """
        taken = self._taken(names)
        for factor in taken:
            items = self.items([factor])
            if items and not items.keys() & set(names):
                raise ValueError(
                    f"item 'kfac/{next(iter(items))}' is missing; if its layer was frozen when the "
                    f"state was saved, freeze the layer before K-FAC is made"
                )
        return self.items(taken)

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `forget`.

        A rank without factors calls the method, too: `started` has to agree on all ranks.
        """
        if taken := self._taken(names):
            self.started = True
            self.lacking = self.lacking and len(taken) < len(self.plan.factors)
            for name, value in self.items(taken).items():
                value.copy_(state[name])
            if self.plan.late:
                self._leave_identity_to_owners()

    def _leave_identity_to_owners(self) -> None:
        """Let only the rank that saves an average begin the average at the identity."""
        saved = (one for one in self._at_identity if self._saves(self._factors[one.name]))
        self._at_identity = list(saved)

    def _saves(self, factor: Factor) -> bool:
        """Return whether the rank saves a factor: a kept factor, or if late an owned factor."""
        mine = factor.owner == self.plan.rank or not self.plan.late
        return mine and factor.name in self.averages

    def _taken(self, names: Collection[str]) -> list[Factor]:
        """Return factors with averages in a state with `names`.

        A factor starts anew if the state has a vector for a matrix, or a matrix for a vector.
        """
        forms = {"started", *FORMS.values()}  # a rank's own share may lack factors
        if not forms.intersection(name.partition("/")[0] for name in names):
            return []
        other = {"matrix": FORMS["vector"], "vector": FORMS["matrix"]}
        return [f for f in self.plan.factors if f"{other[f.solver.keeps]}/{f.name}" not in names]

    # -- details ---------------------------------------------------------------------------------

    def _merge(self, decay: float) -> None:
        """Take the sums over a batch into the averages, weighed by numbers of examples."""
        running = list(self._running.values())
        for one in self._at_identity:
            one.weight.copy_(torch.where(one.weight > 0, one.weight, one.count))
        merge(running, decay)

    def _sum(self, share: int | None) -> None:
        """Add up the statistics of all ranks."""
        messages = self._messages[share]
        if not self._squares:
            self.grid.exchange(messages, self.statistics.flat)
        elif messages:
            with self.site.trace.stage(STAGE):
                for factor in self.plan.recorded:
                    square = unfold_triangle(self.statistics[factor.name])
                    self._squares[factor.name].copy_(square)
                    self._squares[factor.counted].copy_(self.statistics[factor.counted])
            self.grid.exchange(messages, self._squares.flat)
            with self.site.trace.stage(STAGE):
                self.statistics.flat.zero_()
                for factor in self.plan.recorded:
                    add_triangle(self.statistics[factor.name], self._squares[factor.name])
                    self.statistics[factor.counted].add_(self._squares[factor.counted])

    def _check(self, step: int) -> None:
        """Leave the batch's factors with NaN or infinity out of the averages."""

        def tell(broken: list[str]) -> None:
            late, rank = self.plan.late, self.plan.rank
            mine = [name for name in broken if late or self._factors[name].owner == rank]
            self.site.nonfinite.note("statistics", mine, step, "their averages stay as they are")

        running = list(self._running.values())
        leave_out_broken(self.statistics.flat, running, self.site.flags, tell)


def _item(factor: Factor) -> str:
    """Return the name of a factor's average in the state."""
    return f"{FORMS[factor.solver.keeps]}/{factor.name}"
