"""Damping that follows the reduction ratio."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import LevenbergMarquardt, SGDGrafting
from mpikfac.numerics import triangles
from support import inside, problem

DAMPING = 0.05


def deep_linear(*widths):
    torch.manual_seed(0)
    pairs = zip(widths, widths[1:])
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs)).double()


def batch(model):
    generator = torch.Generator().manual_seed(1)
    shapes = model[0].in_features, model[-1].out_features
    return [torch.randn(20, size, generator=generator).double() for size in shapes]


def trainer(comm, model, rates, **settings):
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates)]
    choices = {"fisher_type": "type-2", "kl_clip": None, "preconditioner": "eigen"} | settings
    return problem.kfac(model, torch.optim.SGD(groups, lr=0.1), comm, **choices)


def adapted_step(kfac, x, y, **choices):
    """Take a step; return the ratio from `adapt` and the change of the loss."""
    kfac.optimizer.zero_grad()
    outputs = kfac.model(x)
    kfac.record(outputs, loss="squared-error")
    before = F.mse_loss(outputs, y)
    before.backward()
    kfac.step(**choices)
    with torch.no_grad():
        after = F.mse_loss(kfac.model(x), y)
    return kfac.update_damping(before.item(), after.item()), (after - before).item()


def gauss_newton(model, index, x):
    """Return a layer's block of the Gauss-Newton matrix of the squared error, by autograd."""
    weights = [module.weight.detach() for module in model]

    def outputs(weight):
        found = x
        for number, other in enumerate(weights):
            found = found @ (weight if number == index else other).T
        return found.flatten()

    jacobian = torch.autograd.functional.jacobian(outputs, weights[index]).flatten(1)
    return 2 / len(jacobian) * jacobian.T @ jacobian


def damped_product(kfac, name):
    """Return a layer's `(G + damping / pi) (x) (A + damping pi)`, written out."""
    a, g = (triangles.unfold_triangle(inside.factors(kfac)[f"{name}.{side}"]) for side in "AG")
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    shares = pi * DAMPING**0.5, DAMPING**0.5 / pi
    a, g = (m + share * torch.eye(len(m)) for m, share in zip((a, g), shares))
    return torch.kron(g, a)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("max_norm", [None, 1e-3, 0.0])
@pytest.mark.parametrize(
    "clip", [{}, {"kl_clip": 1e-4}, {"kl_clip": None, "norm_clip": 0.1}], ids=["", "kl", "norm"]
)
def test_the_ratio_is_that_of_autograds_gauss_newton_matrix(comm, preconditioner, clip, max_norm):
    """Oracle: the quadratic model of the taken step, with dense matrices.

    The eigen preconditioner's matrix is autograd's Gauss-Newton matrix with damping. The inverse
    preconditioner's matrix is the preconditioner's own damped product. In a deep linear net both
    have the same factors.
    """
    model = deep_linear(6, 5, 4, 3)
    x, y = batch(model)
    before = [module.weight.detach().clone() for module in model]
    blocks = [gauss_newton(model, index, x) for index in range(3)]
    gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    damping = LevenbergMarquardt(DAMPING)
    kfac = trainer(
        comm, model, [0.1, 0.2, 0.3], damping=damping, preconditioner=preconditioner, **clip
    )
    ratio, change = adapted_step(kfac, x, y, max_norm=max_norm)
    if max_norm == 0:
        assert math.isnan(ratio)  # nothing was stepped
        return
    predicted = 0.0
    for name, module, old, block, gradient in zip("012", model, before, blocks, gradients):
        delta = (module.weight.detach() - old).flatten()
        damped = block + DAMPING * torch.eye(len(block))
        matrix = damped if preconditioner == "eigen" else damped_product(kfac, name)
        predicted += (gradient.flatten() @ delta + delta @ matrix @ delta / 2).item()
    assert (kfac.kl_scale.item() < 1) == (bool(clip) and max_norm is None)
    assert ratio == pytest.approx(change / predicted, rel=1e-6 if max_norm else 1e-9)


@pytest.mark.parametrize(("widths", "power"), [((6, 3), 1), ((6, 5, 4, 4, 3), -1)])
def test_damping_moves_to_where_the_model_is_right(comm, widths, power):
    """Oracle: by hand.

    A single layer's loss equals the model except for damping, and falls further.

    With four layers, every layer promises to mend the same error.
    """
    model = deep_linear(*widths)
    damping = LevenbergMarquardt(
        DAMPING, damping_adaptation_interval=3, damping_adaptation_decay=0.9
    )
    kfac = trainer(comm, model, [1.0] * len(model), damping=damping)
    ratio, _ = adapted_step(kfac, *batch(model))
    assert ratio > 1 if power == 1 else ratio < 1 / 4
    assert damping.damping == pytest.approx(DAMPING * 0.9 ** (3 * power), rel=1e-15)
    assert inside.damping(kfac, kfac.steps) == damping.damping


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        *((0.76, 0.5), (math.inf, 0.5), (0.75, 1.0), (0.25, 1.0)),
        *((0.24, 2.0), (-3.0, 2.0), (-math.inf, 2.0), (math.nan, 2.0)),
    ],
)
def test_the_rule(ratio, expected):
    """Oracle: by hand, of 1/4 over two steps [Martens & Grosse 2015, 6.5]."""
    damping = LevenbergMarquardt(
        1.0, damping_adaptation_interval=2, damping_adaptation_decay=0.5**0.5
    )
    damping.follow(ratio)
    assert damping(7) == pytest.approx(expected)


def test_damping_stays_within_its_bounds():
    """Oracle: the bounds."""
    damping = LevenbergMarquardt(
        0.1,
        damping_adaptation_interval=2,
        damping_adaptation_decay=0.5,
        min_damping=0.03,
        max_damping=0.3,
    )
    for ratio, bound in ((1.0, 0.03), (0.0, 0.3)):
        for _ in range(5):
            damping.follow(ratio)
        assert damping.damping == bound


def test_it_is_due_every_so_many_steps():
    """Oracle: the multiples of `every`."""
    damping = LevenbergMarquardt(damping_adaptation_interval=3)
    assert [steps for steps in range(1, 10) if damping.due(steps)] == [3, 6, 9]


def test_nothing_is_learned_where_nothing_was_stepped(comm):
    """Oracle: the damping before."""
    model = deep_linear(6, 3)
    damping = LevenbergMarquardt(DAMPING)
    kfac = trainer(comm, model, [0.1], damping=damping)
    assert math.isnan(kfac.update_damping(1.0, 2.0))
    assert damping.damping == DAMPING


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            {"damping_adaptation_interval": 0},
            "damping_adaptation_interval=0 must be a whole number >= 1",
        ),
        (
            {"damping_adaptation_interval": 2.0},
            "damping_adaptation_interval=2.0 must be a whole number >= 1",
        ),
        (
            {"damping_adaptation_decay": 1.0},
            "damping_adaptation_decay=1.0 must be above 0 and below 1",
        ),
        (
            {"damping_adaptation_decay": math.nan},
            "damping_adaptation_decay=nan must be a number above 0",
        ),
        ({"damping": 0.0}, "damping=0.0 must be a number above 0"),
        ({"damping": math.nan}, "damping=nan must be a number above 0"),
        (
            {"max_damping": math.inf},
            "max_damping=inf must be finite numbers above 0 in ascending order",
        ),
        ({"max_damping": 0.01}, "damping=0.03 and max_damping=0.01 must be finite numbers above 0"),
    ],
)
def test_bad_numbers_are_refused(numbers, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        LevenbergMarquardt(**numbers)


def test_grafting_leaves_nothing_to_adapt(comm):
    with pytest.raises(ValueError, match="adapted=.* needs grafting.prescribes=False, not True"):
        trainer(
            comm, deep_linear(6, 3), [0.1], damping=LevenbergMarquardt(), grafting=SGDGrafting()
        )


def test_fixed_damping_is_not_adapted(comm):
    kfac = trainer(comm, deep_linear(6, 3), [0.1], damping=0.1)
    with pytest.raises(ValueError, match=r"needs damping=LevenbergMarquardt\(\.\.\.\), not 0.1"):
        kfac.update_damping(1.0, 0.5)


def test_a_step_that_was_skipped_has_no_ratio(comm):
    """Oracle: NaN, and the damping as it was."""
    damping = LevenbergMarquardt(DAMPING, damping_adaptation_interval=1)
    model = deep_linear(3, 2)
    kfac = trainer(comm, model, [0.1], damping=damping)
    x, y = batch(model)
    adapted_step(kfac, x, y)
    reached, scaler = damping.damping, torch.amp.GradScaler("cpu")
    outputs = model(x)
    kfac.record(outputs, loss="squared-error")
    scaler.scale(math.inf * F.mse_loss(outputs, y)).backward()
    kfac.step(scaler)
    assert math.isnan(kfac.update_damping(1.0, 1.0))
    assert damping.damping == reached
