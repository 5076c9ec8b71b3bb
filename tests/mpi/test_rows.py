"""Rows that ranks exchange, forward and backward."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import mpikfac
from mpikfac.plan import names, rows
from support.problem import DEVICE


def group_of(comm):
    return mpikfac.comm.Group(comm, 0, mpikfac.Trace(events=True), "world")


def counts_of(size):
    """Return how many rows each rank sends to each rank, some of them 0."""
    return np.random.default_rng(size).integers(0, 4, (size, size)) * (size > 1) + (size == 1) * 3


def sent_by(source, counts, shape):
    """Return the rows of a rank: the same on all ranks that ask."""
    return np.random.default_rng([7, source]).normal(size=(counts[source].sum(), *shape))


def part(source, target, counts, array):
    """Return the rows from one rank to another."""
    start = counts[source, :target].sum()
    return array[start : start + counts[source, target]]


@pytest.mark.parametrize("shape", [(5,), (), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_rows_go_to_members_in_order(comm, dtype, shape):
    """Oracle: numpy slices of the rows of all ranks."""
    counts = counts_of(comm.size)

    def rows_of(source):
        return torch.from_numpy(100 * sent_by(source, counts, shape)).to(dtype)

    received = mpikfac.lab.exchange_rows(
        rows_of(comm.rank).to(DEVICE), group_of(comm), counts[comm.rank], counts[:, comm.rank]
    )
    parts = [part(r, comm.rank, counts, rows_of(r)) for r in range(comm.size)]
    assert received.dtype == dtype
    assert torch.equal(received.cpu(), torch.cat(parts))


def test_the_backward_pass_is_the_transposed_exchange(comm):
    """Oracle: numpy: the sum over all ranks of squares of received rows, times weights."""
    counts = counts_of(comm.size)
    mine = torch.from_numpy(sent_by(comm.rank, counts, (4,))).to(DEVICE).requires_grad_()
    received = mpikfac.lab.exchange_rows(
        mine, group_of(comm), counts[comm.rank], counts[:, comm.rank]
    )
    ((comm.rank + 1) * received.square()).sum().backward()
    factors = np.repeat(np.arange(1, comm.size + 1), counts[comm.rank])[:, None]
    expected = 2 * factors * sent_by(comm.rank, counts, (4,))
    np.testing.assert_allclose(mine.grad.cpu(), expected, rtol=1e-15)


def test_derivatives_are_those_of_finite_differences(comm):
    """Oracle: torch.autograd.gradcheck of all ranks' rows, moved by the same step on all ranks."""
    counts = counts_of(comm.size)
    group, sides = group_of(comm), (counts[comm.rank], counts[:, comm.rank])

    def exchanged(step):
        mine = torch.from_numpy(sent_by(comm.rank, counts, (4,))).to(DEVICE)
        theirs = mpikfac.lab.exchange_rows((mine * step).sin(), group, *sides)
        there_and_back = mpikfac.lab.exchange_rows(theirs.exp(), group, *sides[::-1])
        return there_and_back.sum(0)

    step = torch.tensor([0.3, -0.2, 0.5, 0.9], dtype=torch.float64, device=DEVICE)
    assert torch.autograd.gradcheck(exchanged, step.requires_grad_())
    assert torch.autograd.gradgradcheck(exchanged, step)


def test_bytes_of_trace_and_plan_are_equal(comm):
    """Oracle: rows times bytes of a row, by numpy; a rank alone sends nothing."""
    counts = counts_of(comm.size)
    group = group_of(comm)
    mine = torch.from_numpy(sent_by(comm.rank, counts, (4,))).to(DEVICE).requires_grad_()
    mpikfac.lab.exchange_rows(mine, group, counts[comm.rank], counts[:, comm.rank]).sum().backward()
    sent = group.trace.sent
    there = rows(names.EXCHANGE_ACTIVATIONS, counts.tolist(), 32, comm.rank)
    back = rows(names.EXCHANGE_ACTIVATION_GRADIENTS, counts.T.tolist(), 32, comm.rank)
    for message, numbers in zip(there + back, (counts[comm.rank], counts[:, comm.rank])):
        others = numbers.sum() - numbers[comm.rank]
        assert sent[message.stage] == message.bytes == 32 * numbers.sum()
        assert message.wire == 32 * others
    assert len(sent) == len(there + back) == (2 if comm.size > 1 else 0)
    assert all(event.over == "world" for event in group.trace.events)


@pytest.mark.skipif(mpikfac.world().size == 1, reason="one rank agrees with itself")
def test_rows_that_require_gradients_on_some_ranks_are_refused(comm):
    """Oracle: the same text on all ranks; without it, one rank waits in its backward pass."""
    right = [2] * comm.size
    some = torch.zeros(2 * comm.size, 3, device=DEVICE, requires_grad=comm.rank == 0)
    with pytest.raises(mpikfac.UserError, match="on member 0 but not on member 1: call rows"):
        mpikfac.lab.exchange_rows(some, group_of(comm), right, right)


def test_counts_that_do_not_fit_are_refused(comm):
    """Oracle: the error's text; no rank communicates."""
    group, some = group_of(comm), torch.zeros(2 * comm.size, 3, device=DEVICE)
    right = [2] * comm.size
    with pytest.raises(ValueError, match="counts >= 0"):
        mpikfac.lab.exchange_rows(some, group, [*right, 2], right)
    with pytest.raises(ValueError, match="counts >= 0"):
        mpikfac.lab.exchange_rows(some, group, right, [-1] * comm.size)
    ones = np.ones(comm.size, np.int64)
    said = re.escape(f"counts_out={ones.tolist()} must add up to ")
    with pytest.raises(ValueError, match=said):
        mpikfac.lab.exchange_rows(some, group, ones, ones)
    with pytest.raises(TypeError, match="'float'"):
        mpikfac.lab.exchange_rows(some, group, [2.0] * comm.size, right)
    with pytest.raises(ValueError, match=f"at member {comm.rank}"):
        mpikfac.lab.exchange_rows(some, group, right, [1] * comm.size)


@pytest.mark.parametrize("exchanges", [1, 2])
@pytest.mark.parametrize("way", ["detach", "no_grad", "inference_mode"])
def test_rows_that_require_gradients_on_one_rank_are_refused(comm, way, exchanges):
    """Oracle: the same line on all ranks, in the exchange whose backward pass would wait."""
    if comm.size == 1:  # no other rank waits
        return
    group, counts = group_of(comm), [1] * comm.size
    x = torch.ones(comm.size, 3, device=DEVICE, requires_grad=True)
    for _ in range(exchanges - 1):
        mpikfac.lab.exchange_rows(x, group, counts, counts)
    last = comm.rank == comm.size - 1
    without = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(way)
    with pytest.raises(mpikfac.UserError, match="rows require gradients on member 0 but not on"):
        if last and without:
            with without():
                mpikfac.lab.exchange_rows(x, group, counts, counts)
        else:
            mpikfac.lab.exchange_rows(x.detach() if last else x, group, counts, counts)
