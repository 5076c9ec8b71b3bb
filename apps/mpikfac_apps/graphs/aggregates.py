"""Sum over a node's neighbours; rows of other ranks are current, delayed, averaged or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import mpikfac
from mpikfac_apps.graphs.networks import Aggregate
from mpikfac_apps.graphs.parts import GraphPart, with_means

AGGREGATES = ("exact", "local", "delayed", "means")
THERE = (mpikfac.plan.names.EXCHANGE_ACTIVATIONS, mpikfac.plan.names.EXCHANGE_ACTIVATION_GRADIENTS)
BACK = THERE[::-1]
Exchange = Callable[[Tensor], Tensor]
"""Sends rows `[sent, width]` to other ranks, and returns the received rows `[received, width]`."""


class Halo(NamedTuple):
    """This rank's part of a graph, and the group of ranks among which the graph is divided.

    Attributes:
        share: the fraction of the graph's nodes that this rank owns.
    """

    group: mpikfac.comm.Group
    part: GraphPart
    share: float


def of_own(halo: Halo) -> Aggregate:
    """Return a sum over those neighbours that this rank owns; it sends no messages."""
    return lambda rows: halo.part.own @ rows


def of_all(halo: Halo, exchange: Exchange) -> Aggregate:
    """Return a sum over the neighbours on all ranks.

    On each rank, gradients are those of the mean loss over all ranks, divided by the fraction of
    the nodes that the rank owns, because the trainer multiplies them by this fraction. Gradients
    that are sent to another rank are therefore rescaled.

    Collective over: group, forward and backward.
    """

    def aggregate(rows: Tensor) -> Tensor:
        sent = _weighed(halo.part.sent @ rows, 1 / halo.share)
        received = _weighed(exchange(sent), halo.share)
        return halo.part.own @ rows + halo.part.halo @ received

    return aggregate


def in_time(halo: Halo) -> Exchange:
    """Return an exchange of rows without delay: ranks receive the rows of the current step.

    Collective over: group, forward and backward.
    """
    counts = halo.part.counts_out, halo.part.counts_in
    return lambda rows: mpikfac.lab.exchange_rows(rows, halo.group, *counts, THERE)


class Late:
    """Exchange rows and their gradients, which arrive `delay` steps late [DistGNN].

    In each step, ranks exchange every `delay`-th row, in round-robin order, and use what was sent
    for the same rows `delay` steps earlier. Rows are therefore `delay` to `2 delay - 1` steps old;
    before they first arrive, they are 0.

    Collective over: group, forward and backward.

    Args:
        width: the number of elements per row.
        delay: the delay in steps, at least 1.
        clock: returns the number of completed steps.
    """

    def __init__(
        self,
        halo: Halo,
        width: int,
        delay: int,
        clock: Callable[[], int],
    ) -> None:
        group, out, into = halo.group, halo.part.counts_out, halo.part.counts_in
        zeros = halo.part.own.values().new_zeros
        self._there = _Line(group, (out, into), THERE, delay, zeros(2, sum(into), width))
        self._back = _Line(group, (into, out), BACK, delay, zeros(2, sum(out), width))
        self._clock = clock

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the delayed rows of other ranks."""
        received: Tensor = _LateRows.apply(rows, self._there, self._back, self._clock())  # type: ignore[no-untyped-call]
        return received

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield, by name, the delayed rows and gradients: those in use, and those in transit."""
        yield from (("rows", self._there.rows), ("gradients", self._back.rows))


class Sums(NamedTuple):
    """The sums over neighbours in a training run.

    Attributes:
        halo: this rank's part of the graph.
        first: sums the features of neighbours, for the first layer; computed once.
        hidden: for each further layer, sums the hidden rows of neighbours.
        late: for each further layer, the exchange that delays rows; empty without delay.
    """

    halo: Halo
    first: Aggregate
    hidden: Sequence[Aggregate]
    late: Sequence[Late] = ()


def sums_of(
    name: str, halo: Halo, widths: Sequence[int], delay: int, clock: Callable[[], int]
) -> Sums:
    """Return the sums over neighbours for a name in `AGGREGATES`.

    Args:
        halo: this rank's part of the graph; for "local", it contains only edges within ranks.
        widths: the width of the hidden rows that enter each layer except the first.
        delay: for "delayed", the delay in steps; 0 for exact sums.
        clock: for "delayed", returns the number of completed steps.
    """
    if name == "local":
        return Sums(halo, of_own(halo), [of_own(halo)] * len(widths))
    if name == "means":
        halo = halo._replace(part=with_means(halo.part))
    exact = of_all(halo, in_time(halo))
    if name != "delayed" or not delay:
        return Sums(halo, exact, [exact] * len(widths))
    late = [Late(halo, width, delay, clock) for width in widths]
    return Sums(halo, exact, [of_all(halo, each) for each in late], late)


class _Line:
    """Delayed rows in one direction: activations to their users, or gradients back to the owners.

    Attributes:
        rows: the rows in use, and those in transit, `[2, received, width]`.
    """

    def __init__(
        self,
        group: mpikfac.comm.Group,
        counts: tuple[Sequence[int], Sequence[int]],
        stages: tuple[str, str],
        delay: int,
        rows: Tensor,
    ) -> None:
        self._group, self._stages, self._delay, self.rows = group, stages, delay, rows
        self._turns = [
            [_of_turn(side, turn, delay, rows.device) for side in counts] for turn in range(delay)
        ]

    def pass_on(self, rows: Tensor, step: int) -> Tensor:
        """Send the rows that are due in the step; return a copy of the rows in use."""
        (sent, counts_out), (received, counts_in) = self._turns[step % self._delay]
        self.rows[0, received] = self.rows[1, received]
        self.rows[1, received] = mpikfac.lab.exchange_rows(
            rows[sent], self._group, counts_out, counts_in, self._stages
        )
        return self.rows[0].clone()


def _of_turn(
    counts: Sequence[int], turn: int, delay: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """Return the indices of the rows that are due in a turn, and their number for each rank."""
    places = np.concatenate([np.arange(count) for count in counts])
    of_turn = np.flatnonzero(places % delay == turn)
    return torch.from_numpy(of_turn).to(device), [len(range(turn, c, delay)) for c in counts]


class _LateRows(torch.autograd.Function):
    """Return delayed rows in the forward pass, and delayed gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: _Line, back: _Line, step: int) -> Tensor:
        ctx.back, ctx.step = back, step
        return there.pass_on(rows, step)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Any:
        return ctx.back.pass_on(gradients, ctx.step), None, None, None


class _WeighedGradient(torch.autograd.Function):
    """Return the tensor in the forward pass, and scale its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.weight, None


def _weighed(x: Tensor, weight: float) -> Tensor:
    weighed: Tensor = _WeighedGradient.apply(x, weight)  # type: ignore[no-untyped-call]
    return weighed
