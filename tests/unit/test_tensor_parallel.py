"""The choice of data or model parallelism for each layer, and split layers in a model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mpikfac
from mpikfac import TensorParallelPlan
from mpikfac.lab.tensor_parallel.rows import layers_before
from mpikfac.plan import (
    CHANNELS,
    LayerCall,
    divisors,
    layer_messages,
    places,
    tensor_parallel_table,
)
from mpikfac.predict import Level, Machine, choose_tensor_parallel_plan, tensor_parallel_seconds

pytestmark = pytest.mark.lab

MACHINE = Machine("given", Level(1e-3, 1e6), (), {})


@st.composite
def rows(draw):
    """Return up to four layers; a layer may follow the layer before."""
    count, calls = draw(st.integers(1, 4)), []
    widths = [draw(st.sampled_from([1, 4, 6, 64])) for _ in range(count + 1)]
    for place in range(count):
        follows = str(place - 1) if place and draw(st.booleans()) else ""
        batch = draw(st.integers(1, 40))
        taken, given = batch * widths[place], batch * widths[place + 1]
        weight = (widths[place + 1], widths[place])
        calls.append(LayerCall(str(place), weight, True, taken, given, place > 0, follows))
    return calls


def all_plans(calls, ranks):
    """Return every plan of every `tp_size`."""
    found = [TensorParallelPlan()]
    for tp_size in divisors(ranks)[1:]:
        for axes in itertools.product((None, *CHANNELS), repeat=len(calls)):
            chosen = {call.name: axis for call, axis in zip(calls, axes) if axis}
            if chosen and all(can_run(call, chosen, tp_size, calls) for call in calls):
                found.append(TensorParallelPlan(tp_size, chosen))
    return found


def can_run(call, chosen, tp_size, calls):
    """Return whether all slices of a layer are equal, also slices of outputs that are handed on."""
    gives = places(calls, chosen)[call.name].gives
    axes = {chosen.get(call.name), "outputs" if gives else None} - {None}
    return all(call.can_split(axis, tp_size) for axis in axes)


def wire(calls, tp_plan, ranks):
    """Return the bytes that a rank sends in rings."""
    at, tp_size = places(calls, tp_plan.layers), tp_plan.tp_size
    return sum(m.wire for c in calls for m in layer_messages(c, at[c.name], tp_size, ranks, 4))


@given(rows(), st.sampled_from([1, 2, 3, 4, 6]))
def test_the_choice_has_the_fewest_bytes(calls, ranks):
    """Oracle: all plans, counted one by one."""
    found = wire(calls, choose_tensor_parallel_plan(calls, ranks), ranks)
    assert found == min(wire(calls, d, ranks) for d in all_plans(calls, ranks))


@given(rows(), st.sampled_from([2, 4]))
def test_the_choice_has_the_fewest_seconds(calls, ranks):
    """Oracle: all plans, counted one by one."""

    def seconds(tp_plan):
        return tensor_parallel_seconds(calls, tp_plan, ranks, MACHINE)

    least = min(map(seconds, all_plans(calls, ranks)))
    found = seconds(choose_tensor_parallel_plan(calls, ranks, MACHINE))
    assert found == pytest.approx(least, rel=1e-9)


def test_bytes_of_a_layer_by_formula():
    """Oracle: the formulas of the page, with n inputs, m outputs, b examples and r ranks."""
    n, m, b, r, ranks = 64, 32, 12, 4, 8
    calls = [LayerCall("fc", (m, n), False, b * n, b * m)]
    gradients = 4 * n * m * ((r - 1) / r + 2 / r * (ranks // r - 1) / (ranks // r))
    outputs = 4 * (2 * (r - 1) * b * n + 2 * (r - 1) / r * b * m) + gradients
    inputs = 4 * (2 * (r - 1) / r * b * n + 2 * (r - 1) * b * m) + gradients
    assert wire(calls, TensorParallelPlan(r, {"fc": "outputs"}), ranks) == outputs
    assert wire(calls, TensorParallelPlan(r, {"fc": "inputs"}), ranks) == inputs
    assert wire(calls, TensorParallelPlan(), ranks) == 8 * n * m * (ranks - 1) / ranks


def test_large_layers_are_split_and_small_layers_are_not():
    """Oracle: the formula: VGG's first linear layer against a convolution on large images.

    Latencies of two messages with activations are more than a sum of gradients in a single piece.
    """
    linear = LayerCall("fc", (4096, 25088), True, 32 * 25088, 32 * 4096)
    convolution = LayerCall("conv", (64, 64, 3, 3), True, 32 * 64 * 224**2, 32 * 64 * 224**2)
    assert choose_tensor_parallel_plan([convolution, linear], 4).layers == {"fc": "inputs"}
    assert choose_tensor_parallel_plan([convolution], 4) == TensorParallelPlan()
    slow = Machine("slow", Level(10.0, 1e9), (), {})
    one_piece = LayerCall("fc", (1024, 2048), True, 32 * 2048, 32 * 1024)
    assert choose_tensor_parallel_plan([one_piece], 4).layers == {"fc": "inputs"}
    assert choose_tensor_parallel_plan([one_piece], 4, slow) == TensorParallelPlan()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ranks, tp_size", [(1, 1), (6, 2), (6, 3), (8, 4), (4, 4)])
def test_groups_and_peers_are_a_grid(ranks, tp_size, strided):
    """Oracle: a grid: a group and a team of peers share one rank, and each covers all ranks."""
    at = TensorParallelPlan(tp_size, {}, strided)
    for rank in range(ranks):
        group, peers = at.group(rank, ranks), at.peers(rank, ranks)
        assert (len(group), len(peers)) == (tp_size, ranks // tp_size)
        assert set(group) & set(peers) == {rank}
        assert all(at.group(other, ranks) == group for other in group)
        assert len({peer for member in group for peer in at.peers(member, ranks)}) == ranks


def test_layers_hand_on_slices_only_over_modules_by_channel():
    """Oracle: pairs by hand; batch normalisation has parameters by channel."""
    linear, conv = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)

    def pairs(*modules):
        return layers_before(nn.Sequential(*modules))

    assert pairs(linear, nn.ReLU(), nn.Dropout(), nn.Linear(4, 4)) == {"3": "0"}
    assert pairs(conv, nn.MaxPool2d(2), nn.Flatten(), nn.ReLU(), linear) == {"4": "0"}
    assert pairs(conv, nn.Identity(), nn.Conv2d(4, 4, 1)) == {"2": "0"}
    assert pairs(conv, nn.Flatten(), nn.AvgPool1d(2), linear) == {}
    assert pairs(conv, nn.Flatten(2), linear) == {}
    assert pairs(conv, linear) == {}
    assert pairs(linear, conv) == {}
    assert pairs(linear, nn.Flatten(), nn.Linear(4, 4)) == {}
    assert pairs(conv, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)) == {}
    assert pairs(conv, nn.MaxPool2d(2, return_indices=True), nn.Conv2d(4, 4, 1)) == {}
    norm = nn.LayerNorm(4)
    assert pairs(linear, norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)) == {}


def test_calls_have_the_numbers_of_the_batch():
    """Oracle: shapes by hand; the model is not changed and may be large."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 10))
    calls = mpikfac.lab.layer_calls(body, torch.empty(5, 3, 4, 4))
    assert calls == [
        LayerCall("0", (8, 3, 3, 3), True, 5 * 3 * 16, 5 * 8 * 4, False),
        LayerCall("3", (10, 32), True, 5 * 32, 5 * 10, True, "0"),
    ]
    assert not any(module._forward_hooks for module in body.modules())
    table = tensor_parallel_table(calls, TensorParallelPlan(2, {"0": "outputs", "3": "inputs"}), 4)
    assert [line.split()[:6] for line in table.splitlines()[2:4]] == [
        ["0", "2", "2", "outputs", "examples", "channels"],
        ["3", "2", "2", "inputs", "channels", "examples"],
    ]
