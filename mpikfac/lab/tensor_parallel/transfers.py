"""Exchange activations with functions that autograd can differentiate.

An exchange is a linear function of the tensors of all ranks in a group, and its backward pass is
the transposed function. The transpose of a gather is a reduce-scatter, and vice versa; the
transpose of a change of the split dimension, or of an exchange of rows, is the reverse exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import Group
from mpikfac.plan import names

Exchange = Callable[..., Tensor]
"""A function of a tensor and a stage that returns the exchanged tensor."""
Stages = tuple[str, str]


class _Linear(torch.autograd.Function):
    """Run an exchange in the forward pass, and the transposed one in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange, transposed: Exchange, stages: Stages
    ) -> Tensor:
        ctx.transposed, ctx.exchange, ctx.stages = transposed, exchange, stages
        return exchange(x, stage=stages[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # differentiable, for derivatives of gradients
        return _linear(g, ctx.transposed, ctx.exchange, ctx.stages[::-1]), None, None, None


def _linear(
    x: Tensor,
    exchange: Exchange,
    transposed: Exchange,
    stages: Stages = (names.EXCHANGE_ACTIVATIONS, names.EXCHANGE_ACTIVATION_GRADIENTS),
) -> Tensor:
    output: Tensor = _Linear.apply(x, exchange, transposed, stages)  # type: ignore[no-untyped-call]
    return output


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the tensors of all members of the group, joined along `dim`.

    Collective over: group, forward and backward.
    """
    return _linear(x, partial(group.gather, dim=dim), partial(group.sum_parts, dim=dim))


def sum_parts(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the rank's part, along `dim`, of the sum over the group.

    Collective over: group, forward and backward.
    """
    return _linear(x, partial(group.sum_parts, dim=dim), partial(group.gather, dim=dim))


def turn(x: Tensor, group: Group, cut: int, join: int) -> Tensor:
    """Convert slices along `join` of a distributed tensor to slices along `cut`.

    Collective over: group, forward and backward.
    """
    exchange = partial(group.turn, cut=cut, join=join)
    transposed = partial(group.turn, cut=join, join=cut)
    return _linear(x, exchange, transposed)


def exchange_rows(
    rows: Tensor,
    group: Group,
    counts_out: Sequence[int],
    counts_in: Sequence[int],
    stages: Stages = (names.EXCHANGE_ACTIVATIONS, names.EXCHANGE_ACTIVATION_GRADIENTS),
) -> Tensor:
    """Send consecutive rows to each group member; return the received rows, in member order.

    The backward pass sends the gradients of the received rows back. Rows must require gradients on
    all members or on none, even if there are 0 rows.

    Collective over: group, forward and backward.

    Args:
        rows: `[sum(counts_out), ...]`, of any dtype.
        counts_out: the number of rows for each member.
        counts_in: the number of rows from each member, which must equal the entry for this rank in
            that member's `counts_out`.
        stages: the stages of the forward and the backward pass in the group's trace.

    Raises:
        ValueError: counts do not match the group or the rows.
        TypeError: a count is not an integer.
        UserError: only some members' rows require gradients; this is checked in the first
            exchanges.
    """
    counts_out, counts_in = ([*map(index, counts)] for counts in (counts_out, counts_in))
    for name, counts in (("counts_out", counts_out), ("counts_in", counts_in)):
        if len(counts) != group.size or min(counts) < 0:
            raise ValueError(f"{name}={counts} must contain {group.size} counts >= 0")
    if sum(counts_out) != len(rows) or counts_out[group.member] != counts_in[group.member]:
        raise ValueError(
            f"counts_out={counts_out} must add up to {len(rows)} rows, and must equal "
            f"counts_in={counts_in} at member {group.member}"
        )
    group.check_gradients(rows)
    exchange = partial(group.pass_rows, counts_out=counts_out, counts_in=counts_in)
    transposed = partial(group.pass_rows, counts_out=counts_in, counts_in=counts_out)
    return _linear(rows, exchange, transposed, stages)
