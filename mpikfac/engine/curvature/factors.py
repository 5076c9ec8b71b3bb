"""Kronecker factors on one rank: from a batch's sums to averages over ranks and over time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import Sender, Turns, summed
from mpikfac.engine.nonfinite import Flags
from mpikfac.engine.part import Item, Part
from mpikfac.engine.site import Site
from mpikfac.numerics import (
    Arena,
    add_identity,
    add_triangle,
    all_finite,
    copy_all,
    each_finite,
    unfold_triangle,
)
from mpikfac.plan import Factor, stages
from mpikfac.plan.names import FACTORS as FACTOR_ITEMS
from mpikfac.plan.names import REDUCE_STATISTICS, STARTED, VECTORS, WEIGHTS

FORMS = {"matrix": FACTOR_ITEMS, "vector": VECTORS}  # kinds of averages in the state


@dataclass(frozen=True)
class Running:
    """A running average and the batch's sum to merge into it, or a stack of several such pairs.

    Attributes:
        total: the batch's sum over examples; for a stack, `[factors, elements]`.
        count: `[factors]`, the number of examples in the sum; `[1]` without a stack.
        weight: `[factors]`, the number of examples in the average.
    """

    name: str
    total: Tensor
    count: Tensor
    average: Tensor
    weight: Tensor


def merge(running: Sequence[Running], decay: float) -> None:
    """Merge a batch's sums into the averages, weighted by numbers of examples.

    Each sum is replaced by the batch's mean. With a count of 0, the average does not change.
    """
    if not running:
        return
    of_counts, of_weights = [x.count for x in running], [x.weight for x in running]
    counts, sizes = torch.cat(of_counts), list(map(len, of_counts))
    weights = decay * torch.cat(of_weights) + (1 - decay) * counts
    copy_all(zip(of_weights, weights.split(sizes)))
    shares = torch.where(counts > 0, (1 - decay) * counts / weights, 0)[:, None].split(sizes)
    divisors = torch.where(counts > 0, counts, 1)[:, None].split(sizes)
    for each, divisor, share in zip(running, divisors, shares):
        mean = each.total.div_(divisor)
        precise = each.average.to(mean.dtype)  # the average itself if the dtypes are equal
        each.average.copy_(precise.lerp_(mean, share))


def leave_out_broken(
    flat: Tensor, running: Sequence[Running], flags: Flags, report: Callable[[list[str]], None]
) -> None:
    """Set sums with NaN or infinity, and their counts, to 0; call `report` with their names.

    Args:
        flat: the buffer of all sums.
        flags: reports the names later, so that the host need not wait now.
    """
    if not running or (flat.is_cpu and all_finite(flat)):
        report([])
        return
    sound = each_finite([each.total for each in running])
    torch._foreach_mul_([each.count for each in running], list(sound.to(flat.dtype).split(1)))
    flat.nan_to_num_(0.0, 0.0, 0.0)
    names = [each.name for each in running]
    flags.keep(sound, lambda marks: report([n for n, mark in zip(names, marks) if not mark]))


class Factors(Part):
    """The factors on this rank, averaged over ranks whenever a batch has statistics.

    Examples have the same weight on all ranks: a batch's factors are sums over examples,
    which are all-reduced together with the numbers of examples, and averages over time weight
    batches by these numbers. If a batch has no examples for a layer, the layer's averages are kept.

    Attributes:
        statistics: the rank's sums over a batch, and their numbers of examples. They are zero
            between steps: the moments add to them, and `settle` zeroes them. A sum is a triangle,
            or a vector whose square is the factor.
        sender: reduces the statistics over ranks.
        averages: running averages, also as triangles or vectors; initially the identity (or zero
            vectors).
        weights: the numbers of examples in the averages; initially 0.
        started: whether any average contains a batch.
        lacking: whether an average is missing, so that the next batch must be recorded.
    """

    MARK = STARTED

    def __init__(self, site: Site, dtype: torch.dtype, identity: bool = False) -> None:
        """Allocate zeroed arenas.

        Args:
            dtype: the dtype of averages.
            identity: whether averages start at the identity, with the weight of one batch.
        """
        super().__init__(site)
        layouts = self.plan.layouts
        self.statistics = site.arena(layouts.statistics)
        self.averages = site.arena(layouts.averages, dtype)
        weights = torch.zeros(len(self.averages), dtype=site.dtype, device=site.device)
        self.weights = dict(zip(self.averages, weights.split(1)))
        self._factors = {factor.name: factor for factor in self.plan.factors}
        recorded = [name for name in self.averages if name in self.statistics]
        self._running = {name: self._running_of(self._factors[name]) for name in recorded}
        forms = [list(equal) for _, equal in groupby(recorded, self._form)]
        of_forms = zip(forms, weights[: len(recorded)].split(list(map(len, forms))))
        self._stacks = [stack for form in of_forms for stack in self._stacks_of(*form)]
        self._of_layer = {layer.name: layer.factors for layer in self.plan.layers}
        messages = {turn: stages.reduce_statistics(self.plan, turn) for turn in self.plan.turns}
        self.sender = self._sender(messages)
        self._unsettled: tuple[float, int] | None = None
        self._starts_at_identity = identity
        self.started = self.lacking = False
        # Averages that start at the identity, with the weight of the rank's first batch.
        self._at_identity: list[Running] = []

    def _running_of(self, factor: Factor) -> Running:
        name = factor.name
        total, count = self.statistics[name], self.statistics[factor.counted]
        return Running(name, total, count, self.averages[name], self.weights[name])

    def _form(self, name: str) -> Hashable:
        """Return a key that is equal for averages of one stack; on a CPU, each has its own key."""
        return name if self.averages.flat.is_cpu else self.averages[name].shape

    def _stacks_of(self, names: Sequence[str], weights: Tensor) -> Iterator[Running]:
        """Yield running averages of equal shape, as a stack if contiguous, or one by one."""
        total, average = self.statistics.stack(names), self.averages.stack(names)
        count = self.statistics.stack([self._factors[name].counted for name in names])
        if total is None or count is None or average is None:
            for name, weight in zip(names, weights.split(1)):
                yield from self._stacks_of([name], weight)
        else:
            yield Running(names[0], total.flatten(1), count[:, 0], average.flatten(1), weights)

    def _sender(self, messages: Turns) -> Sender:
        if self.plan.layouts.squares.size:
            return Squares(self.site, self.statistics, messages)
        return self._of_triangles(messages)

    def _of_triangles(self, messages: Turns) -> Sender:
        return self.site.sender(REDUCE_STATISTICS, self.statistics, messages, urgency=1)

    # -- a batch ---------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Store the sums of one part of the local batch, and reset them for the next part."""
        self.sender.accumulate()
        self.statistics.flat.zero_()

    def ready(self, layer: str) -> None:
        """Send a layer's complete statistics, if they are sent during the backward pass.

        Collective over: none.
        """
        for factor in self._of_layer[layer]:
            self.sender.ready(factor.name, factor.counted)

    def send_rest(self) -> None:
        """Send the statistics of layers that the backward passes have not reached.

        Does nothing unless statistics are sent during backward passes.

        Collective over: none.
        """
        for name, factors in self._of_layer.items() if self.sender.early else ():
            if not self.sender.is_ready(factors[0].name):
                self.ready(name)

    def unscale(self, names: Collection[str], scale: float) -> bool:
        """Divide a batch's sums of gradients by the loss scale; return whether sums are finite.

        Collective over: none.
        """
        values = self.sender.accumulated
        for name in names:
            sums = values[..., self.statistics.span(name)]
            sums /= scale
            # Divide twice, because the square of the scale can overflow in this dtype.
            if not self._factors[name].preconditioner.vector:
                sums /= scale
        return all_finite(values)

    def average(self, decay: float, step: int) -> None:
        """Merge a batch's factors into the averages; with overlap, at the next `settle`.

        Collective over: world.
        """
        self._unsettled = decay, step
        if not self.sender.early:
            self.settle()

    @property
    def settled(self) -> bool:
        """Whether the averages include all batches so far."""
        return self._unsettled is None

    def settle(self) -> None:
        """Wait for a batch's unfinished messages, and merge its factors into the averages.

        Collective over: world.
        """
        if self._unsettled is None:
            return
        (decay, step), self._unsettled = self._unsettled, None
        self._add_up()
        self._check(step)
        self._merge(decay)
        self.statistics.flat.zero_()
        self.started, self.lacking = True, False

    def _add_up(self) -> None:
        """Reduce a batch's statistics over ranks."""
        self.sender.add_up()

    def _check(self, step: int) -> None:
        """Exclude the batch's factors with NaN or infinity from the averages."""

        def report(broken: list[str]) -> None:
            answered = [name for name in broken if self._answers_for(self._factors[name])]
            self.site.nonfinite.note("statistics", answered, step, "their averages do not change")

        running = list(self._running.values())
        leave_out_broken(self.statistics.flat, running, self.site.flags, report)

    def _answers_for(self, factor: Factor) -> bool:
        """Return whether this rank counts how often a factor is not finite."""
        return factor.owner == self.plan.rank

    def _merge(self, decay: float) -> None:
        """Merge a batch's sums into the averages, weighted by numbers of examples."""
        for running in self._at_identity:
            running.weight.copy_(torch.where(running.weight > 0, running.weight, running.count))
        merge(self._stacks, decay)

    # -- averages --------------------------------------------------------------------------------

    def whole(self, turn: int | None = None) -> Arena:
        """Return the averages, over ranks and over time, of the factors that this rank decomposes.

        Args:
            turn: the slot of the refresh; None for all layers.

        Collective over: world.
        """
        self.settle()
        return self.averages

    def release(self) -> None:
        """Clear the statistics for the next batch, if `whole` has used their memory."""

    def reset(self) -> None:
        """Discard all averages, or reset them to the identity with the weight of one batch."""
        self.averages.flat.zero_()
        for name, average in self.averages.items():
            self.weights[name].zero_()
            if not self._factors[name].preconditioner.vector:
                add_identity(average)
        self.started = self._starts_at_identity
        self._at_identity = list(self._running.values()) if self._starts_at_identity else []
        self.lacking = not self._starts_at_identity

    def abort_batch(self) -> None:
        """Merge the previous batch, and drop what the sender holds of the current batch.

        Collective over: world if statistics are overlapped, otherwise none.
        """
        self.settle()
        self.sender.abort_batch()

    # -- state -----------------------------------------------------------------------------------

    def items(self) -> Iterator[Item]:
        """Return the averages and weights of all factors."""
        for factor in self.plan.factors:
            yield from self._items_of(factor)

    def _items_of(self, factor: Factor) -> Iterator[Item]:
        name, saved = factor.name, self._saves(factor)
        yield Item(_average_of(factor), self.averages.get(name), saved)
        yield Item(WEIGHTS + name, self.weights.get(name), saved)

    def _saves(self, factor: Factor) -> bool:
        """Return whether this rank saves a factor."""
        return True

    def marks(self) -> dict[str, Any]:
        """Return a mark if the averages include at least one batch, otherwise {}."""
        return {STARTED: 1} if self.started else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages over ranks and their weights, by name.

        Collective over: world if statistics are overlapped, otherwise none.
        """
        self.settle()
        return super().state_dict()

    def in_state(self, names: Collection[str]) -> list[Item]:
        """Return the averages and weights of the factors in a state that contains `names`.

        Raises:
            ValueError: the state lacks a factor.
        """
        items: list[Item] = []
        for factor in self._in_state(names):
            of_factor = list(self._items_of(factor))
            held = [item.name for item in of_factor if item.tensor is not None and item.saved]
            if held and not set(held) & set(names):
                raise ValueError(
                    f"item 'kfac/{held[0]}' is missing; its layer was frozen, or had different "
                    f"factors, when the state was saved: freeze the layer before K-FAC is "
                    f"created, or use the same fisher_type and rule as in that run"
                )
            items += of_factor
        return items

    def _in_state(self, names: Collection[str]) -> Iterable[Factor]:
        """Return the factors whose averages are loaded from a state that contains `names`.

        A factor starts from scratch if the state has a vector instead of a matrix, or vice versa.
        """
        # A single rank's part of the state can lack factors.
        if not any(n == STARTED or n.startswith(tuple(FORMS.values())) for n in names):
            return []
        opposite = {"matrix": FORMS["vector"], "vector": FORMS["matrix"]}
        return [
            f for f in self.plan.factors if opposite[f.preconditioner.keeps] + f.name not in names
        ]

    def load_state_dict(self, state: Any, names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`.

        Ranks without factors also call this method, because `started` must be equal on all ranks.
        """
        if begun := list(self._in_state(names)):
            self.started = True
            self.lacking = self.lacking and len(begun) < len(self.plan.factors)
            super().load_state_dict(state, names)

    def take_over(self, before: Factors) -> set[str]:
        """Adopt the averages of layers whose factors are the same as before the model changed.

        Collective over: world.
        """
        same = super().take_over(before)
        taken = {f.name for f in self.plan.factors if _average_of(f) in same}
        begun = taken - {running.name for running in before._at_identity}
        self._at_identity = [each for each in self._at_identity if each.name not in begun]
        self.started = before.started
        (anew,) = summed(self.site.grid.world, [len(self.averages) - len(taken)])
        self.lacking = before.lacking or anew > 0  # the same on all ranks
        return same


class LateFactors(Factors):
    """The factors on this rank, averaged over ranks only before they are decomposed.

    Averages over time and over ranks commute: every rank averages its own examples over time, and
    `whole` reduces the averages over ranks.
    """

    def _of_triangles(self, messages: Turns) -> Sender:
        return Sender(self.site.grid, self.statistics, messages)

    def _add_up(self) -> None:
        """Keep the batch's statistics local: averages are reduced later."""

    def _answers_for(self, factor: Factor) -> bool:
        return True

    def whole(self, turn: int | None = None) -> Arena:
        """Return the averages of all layers or of slot `turn`, over ranks and over time.

        They stay valid until `release`.

        Collective over: world.
        """
        self.settle()
        for running in self._running.values():
            torch.mul(running.average, running.weight, out=running.total)
            running.count.copy_(running.weight)
        self.sender.add_up(turn)
        for name, running in self._running.items():
            running.total.div_(torch.where(running.count > 0, running.count, 1))
            if not self._factors[name].preconditioner.vector:
                add_identity(running.total, (running.count == 0).to(running.count))
        return self.statistics

    def release(self) -> None:
        """Clear the statistics for the next batch."""
        self.statistics.flat.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages over ranks and their weights, by name.

        Averages are moved to their owners first, as in a restart, so that a run that continues and
        one that is resumed stay identical.

        Collective over: world.
        """
        self.settle()
        if self.started:
            self.whole()
            for name, running in self._running.items():
                owned = self._saves(self._factors[name])
                if owned:
                    running.average.copy_(running.total)
                else:
                    running.average.zero_()
                running.weight.copy_(running.count * owned)
            self._leave_identity_to_owners()
            self.release()
        return super().state_dict()

    def load_state_dict(self, state: Any, names: Collection[str]) -> None:
        """Load the `needed` items of a state, after `reset`."""
        super().load_state_dict(state, names)
        if self._in_state(names):
            self._leave_identity_to_owners()

    def _leave_identity_to_owners(self) -> None:
        """Start each average at the identity only on the rank that saves it."""
        saved = (each for each in self._at_identity if self._saves(self._factors[each.name]))
        self._at_identity = list(saved)

    def _saves(self, factor: Factor) -> bool:
        """Return whether this rank owns a factor, and therefore saves it."""
        return factor.owner == self.plan.rank


def _average_of(factor: Factor) -> str:
    """Return the name of a factor's average in the state."""
    return FORMS[factor.preconditioner.keeps] + factor.name


FACTORS = {"factors": Factors, "inverses": LateFactors}
"""The classes of factors, by the strategy's `reduce_factors_at`."""


class Squares(Sender):
    """Send factors as square matrices, as other implementations do."""

    def __init__(self, site: Site, statistics: Arena, messages: Turns) -> None:
        self._site, self._statistics = site, statistics
        super().__init__(site.grid, site.arena(site.plan.layouts.squares), messages)

    @property
    def accumulated(self) -> Tensor:
        """The statistics of the local batch."""
        return self._statistics.flat

    def add_up(self, turn: int | None = None) -> None:
        """Reduce the statistics over ranks, as square matrices."""
        if not self.messages[turn]:
            return
        statistics, recorded = self._statistics, self._site.plan.recorded
        with self._site.trace.stage(REDUCE_STATISTICS):
            for factor in recorded:
                square = unfold_triangle(statistics[factor.name])
                self.arena[factor.name].copy_(square)
                self.arena[factor.counted].copy_(statistics[factor.counted])
        super().add_up(turn)
        with self._site.trace.stage(REDUCE_STATISTICS):
            statistics.flat.zero_()
            for factor in recorded:
                add_triangle(statistics[factor.name], self.arena[factor.name])
                statistics[factor.counted].add_(self.arena[factor.counted])
