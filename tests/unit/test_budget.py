"""The budget: what counts as operations, cuts of factors, longer intervals, and log lines."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mpikfac
from mpikfac import KFACOptimizer, LayerShape
from mpikfac.plan import Operations, Seen, operations
from mpikfac.preconditioners import forms
from mpikfac.settings import Budget, Intervals, seen_in, usual_intervals


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 270), nn.Tanh(), nn.Linear(270, 3)).double()


def batch(step: int = 0, examples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(examples, 300, generator=generator, dtype=torch.float64)
    return x, torch.arange(examples) % 3


def train(optimizer: KFACOptimizer, steps: range) -> torch.Tensor:
    model = optimizer.trainer.model
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def orders(optimizer: KFACOptimizer) -> list[int]:
    return [factor.order for layer in optimizer.trainer.plan.layers for factor in layer.factors]


# -- operations --------------------------------------------------------------------------------


def test_passes_and_statistics_are_what_torch_counts():
    """Oracle: torch's counter, of both passes of two layers and of their moments."""
    model, (x, y) = network(), batch()
    x.requires_grad_()
    with FlopCounterMode(display=False) as passes:
        F.cross_entropy(model(x), y).backward()
    with FlopCounterMode(display=False) as moments:
        for rows in (x, torch.randn(12, 270), torch.randn(12, 270), torch.randn(12, 3)):
            rows.detach().T @ rows.detach()
    kfac = KFACOptimizer(model).trainer
    counted, (form, *_) = Operations(), forms("inverse")
    for layer in kfac.plan.layers:
        without_bias = replace(layer, inputs=layer.inputs - 1)
        counted += operations(without_bias, form, Seen(12, 12), orthogonal=True)
    assert 2 * counted.passes == passes.get_total_flops()
    assert 2 * counted.statistics == moments.get_total_flops()


def test_a_decomposition_is_the_cube_of_the_orders():
    """Oracle: by hand."""
    (form, *_) = forms("inverse")
    layer = LayerShape("fc", 20, 7)
    assert operations(layer, form, Seen(4, 2), True).decomposition == 20**3 + 7**3
    blocks = replace(layer, largest=10)
    assert operations(blocks, form, Seen(4, 2), True).decomposition == 2 * 10**3 + 7**3
    diagonal = replace(layer, diagonal="A")
    assert operations(diagonal, form, Seen(4, 2), True).decomposition == 7**3
    linear = replace(form, work=1)
    assert operations(layer, linear, Seen(4, 2), True).decomposition == 20 + 7


# -- cuts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "spatial", "largest"),
    [
        (1024, 1024, False, None),
        (9217, 128, False, 128),  # the head of a small network for digits
        (129, 1025, False, 128),
        (4609, 512, True, None),  # a convolution of ResNet-50
    ],
)
def test_wide_layers_fall_into_blocks_before_the_first_batch(inputs, outputs, spatial, largest):
    """Oracle: by hand: more than 1,024 rows, and no pixels."""
    layer = LayerShape("fc", inputs, outputs)
    assert Budget(cuts=True).cut(layer, spatial).largest == largest
    assert Budget(cuts=False).cut(layer, spatial) == layer


@pytest.mark.parametrize(
    ("vectors", "inputs", "largest"),
    [
        (0, 785, None),
        (64, 785, 128),
        (512, 785, 256),
        (600, 785, 300),
        (600, 300, None),
        (8192, 4097, 4096),
    ],
)
def test_blocks_have_half_as_many_rows_as_the_batch_has_vectors(vectors, inputs, largest):
    """Oracle: by hand: at least 128 rows; whole factors of fewer."""
    budget = Budget(cuts=True, seen={"fc": Seen(vectors, vectors)})
    for spatial in (False, True):
        assert budget.cut(LayerShape("fc", inputs, 100), spatial).largest == largest


def test_directions_of_a_layer_cut_on_its_smaller_side_are_orthogonal_block_by_block():
    """Oracle: singular values by torch; blocks of rows, whose singular values are near 1."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False)
    blocks = mpikfac.Coverage(rule=lambda layer: replace(layer, largest=16))
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = mpikfac.KFAC(model, plain, coverage=blocks, damping=mpikfac.Damping(relative=1.0))
    model(torch.randn(64, 40)).square().mean().backward()
    kfac.precondition()
    direction = model.weight.grad
    for part in direction.split(15):
        values = torch.linalg.svdvals(part)
        assert values.max() / values.min() < 1.24 / 0.78
    assert torch.linalg.svdvals(direction).max() > 1.1 * torch.linalg.svdvals(part).max()


# -- cuts after the first batch ----------------------------------------------------------------


def test_factors_fall_into_blocks_after_the_first_batch():
    """Oracle: by hand, for 12 vectors."""
    optimizer = KFACOptimizer(network())
    assert orders(optimizer) == [301, 270, 271, 3]
    train(optimizer, range(1))
    assert orders(optimizer) == [100, 100, 101, 90, 90, 90, 90, 90, 91, 3]


@pytest.mark.parametrize(
    "choices",
    [
        {"budget": None},
        {"factor_update_steps": 5},
        {"inv_update_steps": 5},
        {"coverage": mpikfac.Coverage(rule=lambda layer: layer)},
        {"preconditioner": "ekfac"},
        {"preconditioner": "eva"},
        {"preconditioner": "muon"},
    ],
)
def test_choices_by_hand_are_left_alone(choices):
    """Oracle: the factors before the first batch."""
    optimizer = KFACOptimizer(network(), **choices)
    before = orders(optimizer)
    train(optimizer, range(2))
    assert orders(optimizer) == before


def test_a_cut_run_is_the_run_of_blocks_by_hand_from_the_next_step_on():
    """Oracle: K-FAC with the same blocks from the start, which takes over after a step."""
    cut = KFACOptimizer(network())
    train(cut, range(1))
    by_hand = mpikfac.Coverage(rule=lambda layer: replace(layer, largest=128))
    twin = KFACOptimizer(network(), coverage=by_hand)
    train(twin, range(1))
    state = {n: v for n, v in cut.trainer.state_dict().items() if not n.startswith("kfac/seen")}
    twin.trainer.load_state_dict(state)
    torch.testing.assert_close(train(cut, range(1, 5)), train(twin, range(1, 5)), rtol=0, atol=0)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_goes_on_with_the_cut_factors(stop):
    """Oracle: the run without a stop, to the last bit."""
    whole = KFACOptimizer(network())
    train(whole, range(stop))
    stopped = KFACOptimizer(network())
    stopped.trainer.load_state_dict(whole.trainer.state_dict())
    assert orders(stopped) == orders(whole)
    assert torch.equal(train(stopped, range(stop, 7)), train(whole, range(stop, 7)))


@pytest.mark.parametrize("text", ["[]", "{", '{"0": {"vectors": -1, "chosen": 1}}', '{"0": 3}'])
def test_a_state_with_other_numbers_of_vectors_is_refused(text):
    """Oracle: the line, and the run as before."""
    with pytest.raises(ValueError, match="item 'kfac/seen' does not contain valid counts of"):
        seen_in(text)
    optimizer = KFACOptimizer(network())
    state = optimizer.trainer.state_dict() | {"kfac/seen": text}
    with pytest.raises(mpikfac.UserError, match="does not contain valid counts of vectors"):
        optimizer.trainer.load_state_dict(state)
    train(optimizer, range(1))


# -- intervals ---------------------------------------------------------------------------------


def stretched(share: float | None, **counts: int) -> list[tuple[float, float]]:
    """Return the intervals at the first step and once they are whole, in units of the usual."""
    one = Operations(**counts)
    budget = Budget(share, operations={"fc": one}, total=one)
    usual = usual_intervals()
    of_budget = budget.stretched(usual)
    ratios = [(own(at) / plain(at)) for at in (0, 160) for own, plain in zip(of_budget, usual)]
    return [(ratios[0], ratios[1]), (ratios[2], ratios[3])]


G = 10**9


@pytest.mark.parametrize(
    ("counts", "first", "whole"),
    [
        # 50 updates of factors and 10 decompositions in 160 steps; then a 10th and a 50th a step.
        ({"passes": G}, 1, 1),
        ({"passes": G, "statistics": 29 * G // 10}, 1, 1),  # 0.91 G at first; 0.29 G
        ({"passes": G, "statistics": 31 * G // 10}, 1, 2),  # 0.97 G; 0.31 G
        ({"passes": G, "decomposition": 30 * G}, 2, 2),  # 1.88 G; 0.6 G
        ({"passes": G, "statistics": 2 * G, "decomposition": 20 * G}, 2, 2),  # 1.88 G; 0.6 G
        # A step of few operations counts as one of 2^27.
        ({"passes": 10, "decomposition": 10**8}, 1, 1),
        ({"passes": 10, "decomposition": 5 * 10**9}, 3, 3),
    ],
)
def test_intervals_stretch_by_the_least_whole_number(counts, first, whole):
    """Oracle: by hand."""
    assert stretched(0.3, **counts) == [(first, first), (whole, whole)]
    assert stretched(None, **counts) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), "0.3", True])
def test_a_budget_is_positive(budget):
    with pytest.raises(ValueError, match=re.escape(f"budget={budget!r} must be")):
        KFACOptimizer(network(), budget=budget)


# -- the line ----------------------------------------------------------------------------------


def test_a_line_says_once_what_a_step_costs_and_where(caplog):
    """Oracle: the operations by hand, of three blocks each."""
    caplog.set_level(logging.INFO, "mpikfac")
    optimizer = KFACOptimizer(network())
    train(optimizer, range(3))
    (line,) = [r.getMessage() for r in caplog.records if "SGD's operations" in r.getMessage()]
    plan, every = optimizer.trainer.plan, (1 / 10, 1 / 50)
    (form, *_), seen = forms("inverse"), Seen(12, 12)
    counts = [operations(layer, form, seen, orthogonal=True) for layer in plan.layers]
    added = sum(one.direction + one.updates(*every) for one in counts)
    times = 1 + added / sum(one.passes for one in counts)
    assert line.startswith(f"K-FAC: {times:.2g} times SGD's operations per step; layer 0 accounts")
    assert line.endswith("(order 301, in blocks of at most 101)")
    assert times > 2
    assert {r.levelname for r in caplog.records if r.getMessage() == line} == {"WARNING"}


def test_intervals_of_a_budget_are_schedules():
    """Oracle: `Intervals` of the usual schedules, step by step."""
    usual = usual_intervals()
    same = Budget(None).stretched(usual)
    assert isinstance(same, Intervals)
    for step in (0, 19, 20, 159, 160, 1000):
        assert [own(step) for own in same] == [plain(step) for plain in usual]
