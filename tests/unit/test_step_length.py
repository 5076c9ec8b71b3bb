"""The length of a step: grafting and limits."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    AdamGrafting,
    CommOpt,
    Compression,
    KLClip,
    MemOpt,
    NoGrafting,
    SGDGrafting,
    Strategy,
    numerics,
)
from mpikfac.lab import TopK
from mpikfac.numerics import orthogonal, orthogonalised
from support import inside, oracles, problem

PRECONDITIONERS = ["eigen", "ekfac", "inverse", "eva"]


def directions(comm, **settings):
    """Return gradients and directions of the first step, by layer, and the trainer."""
    model = problem.network()
    choices = problem.SETTINGS | {"kl_clip": None} | settings
    kfac = problem.kfac(model, problem.sgd(model), comm, **choices)
    images, labels = problem.batch(0)
    F.cross_entropy(model(images), labels).backward()
    names = oracles.kfac_modules(model).items()
    gradients = {name: oracles.gradient_matrix(module) for name, module in names}
    kfac.precondition()
    return gradients, {n: oracles.gradient_matrix(module) for n, module in names}, kfac


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_grafting_takes_the_gradients_length_and_kfacs_direction(comm, preconditioner):
    """Oracle: norms by hand, and the direction without grafting."""
    gradients, found, _ = directions(comm, preconditioner=preconditioner, grafting=SGDGrafting())
    _, plain, _ = directions(comm, preconditioner=preconditioner)
    for name, gradient in gradients.items():
        unit = plain[name] / plain[name].norm()
        torch.testing.assert_close(found[name], unit * gradient.norm(), rtol=1e-10, atol=1e-14)


def test_grafting_takes_the_length_of_adams_step(comm):
    """Oracle: torch's Adam without momentum, on the gradients of the same steps."""
    model = problem.network()
    choices = problem.SETTINGS | {
        "kl_clip": None,
        "grafting": AdamGrafting(orthogonalize=False, max_trust_ratio=math.inf),
    }
    kfac = problem.kfac(model, problem.sgd(model), comm, **choices)
    modules = oracles.kfac_modules(model)
    shapes = {layer.name: layer.gradient for layer in kfac.plan.layers}
    weights = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    adam = torch.optim.Adam(weights.values(), lr=1.0, betas=(0.0, 0.999))
    for step in range(problem.STEPS):
        images, labels = problem.batch(step)
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for name, module in modules.items():
            weights[name].grad = oracles.gradient_matrix(module)
        before = {name: weight.clone() for name, weight in weights.items()}
        adam.step()
        kfac.precondition()
        for name, module in modules.items():
            length = (weights[name] - before[name]).norm()
            torch.testing.assert_close(oracles.gradient_matrix(module).norm(), length)
        kfac.optimizer.step()


def test_orthogonal_directions_have_kfacs_singular_vectors_and_the_length_of_adams_step(comm):
    """Oracle: the singular value decomposition of the direction without the option."""
    gradients, found, _ = directions(comm, grafting=AdamGrafting(max_trust_ratio=math.inf))
    _, plain, _ = directions(comm)
    for name, gradient in gradients.items():
        left, values, right = torch.linalg.svd(plain[name], full_matrices=False)
        turned = left.T @ found[name] @ right.T
        torch.testing.assert_close(left @ turned @ right, found[name])
        torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=0, atol=1e-9)
        large = turned.diagonal()[values > 0.002 * values.norm()]
        assert len(large) > 1 and large.max() / large.min() < 1.21 / 0.68
        first = gradient / (gradient.abs() + 1e-8)  # Adam's first step
        torch.testing.assert_close(found[name].norm(), first.norm())


@pytest.mark.parametrize("trust", [8.0, 0.3])
@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
def test_a_step_changes_at_most_a_share_of_the_weights(comm, grafting, trust):
    """Oracle: the direction without a limit, shortened to `trust` times the norm of the weights."""
    limit, none = (replace(grafting, max_trust_ratio=ratio) for ratio in (trust, math.inf))
    _, limited, kfac = directions(comm, grafting=limit)
    _, free, _ = directions(comm, grafting=none)
    shortened = set()
    for layer in inside.layers(kfac):
        weights = torch.cat([p.detach().flatten() for p in layer.parameters])
        limit = trust * weights.norm()
        if free[layer.name].norm() > limit:
            shortened.add(layer.name)
        share = (limit / free[layer.name].norm()).clamp(max=1.0)
        torch.testing.assert_close(limited[layer.name], share * free[layer.name])
    assert shortened == ({layer.name for layer in inside.layers(kfac)} if trust < 1 else {"3", "5"})


def test_weights_of_zeros_begin_with_adams_length(comm):
    """Oracle: Adam's first step, of length 1 for each weight."""
    model = problem.network()
    torch.nn.init.zeros_(model[0].weight)
    alone = mpikfac.Coverage(skip=["3", "5"])
    kfac = mpikfac.KFAC(model, problem.plain_sgd(model), comm, coverage=alone)
    images, labels = problem.batch(0)
    F.cross_entropy(model(images), labels).backward()
    gradient = model[0].weight.grad.clone()
    kfac.precondition()
    first = gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(model[0].weight.grad.norm(), first.norm())


@pytest.mark.parametrize("trust", [0.0, -1.0, math.nan])
def test_a_limit_is_positive(trust):
    """Oracle: the line."""
    with pytest.raises(ValueError, match=r"max_trust_ratio=.* must be a number above 0"):
        mpikfac.AdamGrafting(max_trust_ratio=trust)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_follow_the_polynomials(dtype):
    """Oracle: the polynomials of each singular value, as numbers."""
    torch.manual_seed(0)
    shapes = [(5, 30), (5, 30), (30, 5), (3, 6, 4), (7, 7), (4, 1)]
    matrices = [torch.randn(shape, dtype=dtype) for shape in shapes]
    matrices[1][1] = 2 * matrices[1][0]  # rank 4
    for matrix, found in zip(matrices, orthogonalised(matrices)):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        bound = values.pow(8).sum(-1, keepdim=True) ** (1 / 8)
        values = values / bound / orthogonal.MARGIN**0.5
        for first, third, fifth in orthogonal.STEPS:
            values = first * values + third * values**3 + fifth * values**5
        expected = left @ values.diag_embed() @ right
        rounding = 4e3 * torch.finfo(dtype).eps  # the smallest singular values grow 303-fold
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_the_polynomials_bring_singular_values_near_one():
    """Oracle: the bounds that the docstring promises, over the whole range."""
    values = torch.linspace(1 / 350, 1, 10_000, dtype=torch.float64)
    small = torch.linspace(1e-6, 1 / 350, 10_000, dtype=torch.float64)
    shares = small.clone()
    for first, third, fifth in orthogonal.STEPS:
        values = first * values + third * values**3 + fifth * values**5
        small = first * small + third * small**3 + fifth * small**5
    assert 0.78 < values.min() < values.max() < 1.24
    assert small.max() < 1.24 and (small / shares).min() > 270


def test_zeros_stay_zeros_and_a_broken_matrix_harms_no_other():
    """Oracle: the same matrices one by one."""
    torch.manual_seed(0)
    broken = torch.randn(3, 4)
    broken[1, 2] = math.inf
    matrices = [torch.zeros(3, 4), broken, torch.randn(3, 4)]
    zeros, nothing, sound = orthogonalised(matrices)
    assert not zeros.any() and nothing.isnan().all()
    torch.testing.assert_close(sound, orthogonalised(matrices[2:])[0])


@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
def test_momentum_is_taken_before_preconditioning(comm, grafting):
    """Oracle: K-FAC without momentum, of sums of gradients made by hand; the length without."""
    choices = problem.SETTINGS | {"kl_clip": None}
    models = [problem.network() for _ in range(3)]
    graftings = replace(grafting, momentum=0.8), grafting, grafting
    first, second, third = (
        problem.kfac(model, torch.optim.SGD(model.parameters()), comm, **choices, grafting=each)
        for model, each in zip(models, graftings)
    )
    sums = dict.fromkeys(oracles.kfac_modules(models[0]), torch.zeros(()))
    for step in range(problem.STEPS):
        images, labels = problem.batch(step)
        for model in models:
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
        for name, module in oracles.kfac_modules(models[1]).items():
            gradient = oracles.gradient_matrix(module)
            sums[name] = 0.8 * sums[name] + gradient
            oracles.set_gradient(module, gradient + 0.8 * sums[name])
        for kfac in (first, second, third):
            kfac.precondition()
        every = zip(*(oracles.kfac_modules(model).values() for model in models))
        for own, of_sums, plain in (map(oracles.gradient_matrix, found) for found in every):
            torch.testing.assert_close(own / own.norm(), of_sums / of_sums.norm())
            torch.testing.assert_close(own.norm(), plain.norm())
            assert not step or not torch.allclose(own, plain, rtol=0.1)


def test_uncovered_parameters_take_adams_step_with_momentum(comm):
    """Oracle: Adam's step of Nesterov's mean of gradients, by hand; a NaN counts nowhere."""
    model, rate, beta = problem.network(), 0.01, 0.8
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    choices = problem.SETTINGS | {"kl_clip": None, "grafting": AdamGrafting(momentum=beta)}
    kfac = problem.kfac(model, optimizer, comm, **choices)
    bias = model[1].bias
    expected, mean, square, weight = bias.detach().clone(), 0.0, 0.0, 0.0
    for step in range(problem.STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(problem.batch(step)[0]), problem.batch(step)[1]).backward()
        gradient = bias.grad.clone()
        if step == 1:
            bias.grad[0] = math.nan
        else:
            mean = beta * mean + (1 - beta) * gradient
            square = 0.999 * square + 0.001 * gradient**2
            weight = 0.999 * weight + 0.001
            direction = beta * mean + (1 - beta) * gradient
            expected -= rate * direction / ((square / weight).sqrt() + 1e-8)
        kfac.step()
        torch.testing.assert_close(bias.detach(), expected)


def test_a_momentum_has_needs(comm):
    """Oracle: the words of the error."""
    for wrong in (1.5, "0.9"):
        with pytest.raises(ValueError, match="must be a number in \\[0, 1\\)"):
            mpikfac.AdamGrafting(momentum=wrong)
    model = problem.network()
    with pytest.raises(ValueError, match=r"momentum.*=1.5 must be"):
        mpikfac.AdamGrafting(momentum=lambda step: 1.5)
    grafting = AdamGrafting(orthogonalize=False, momentum=0.9)
    with pytest.raises(ValueError, match=r"momentum=0.9\) needs clip=None, not KLClip"):
        mpikfac.KFAC(model, problem.sgd(model), comm, grafting=grafting, clip=KLClip())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(ValueError, match=r"needs an optimizer with momentum 0, not 0.5"):
        mpikfac.KFAC(model, optimizer, comm, grafting=grafting)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    top = Strategy(CommOpt(), compression=Compression(gradients=TopK(momentum=0.9)))
    with pytest.raises(ValueError, match="leave one of them out"):
        mpikfac.KFAC(model, plain, comm, top, grafting=grafting)
    kfac = mpikfac.KFAC(model, plain, comm, grafting=grafting)
    state = kfac.state_dict() | {"optimizer/groups/0/momentum": 0.5}
    state_of_optimizer = {n: v for n, v in state.items() if not n.startswith("kfac/")}
    with pytest.raises(
        mpikfac.UserError, match=r"must be 0 with grafting.momentum=.*0.9.*; it is 0.5"
    ):
        kfac.load_state_dict(state)
    problem.run(kfac, comm, [0])
    for other in (mpikfac.KFAC(model, plain, comm), mpikfac.FirstOrderTrainer(model, plain, comm)):
        with pytest.raises(mpikfac.UserError, match=r"the state contains gradient momentum"):
            other.load_state_dict(kfac.state_dict())
    for other in (mpikfac.KFAC, mpikfac.FirstOrderTrainer):
        with pytest.raises(
            mpikfac.UserError, match="must be 0 with compression.gradients.momentum=0.9; it"
        ):
            other(model, plain, comm, top).load_state_dict(state_of_optimizer)


@pytest.mark.parametrize("call", ["step", "precondition"])
def test_a_scheduler_gives_no_second_momentum(comm, call):
    """Oracle: the line; the weights stay."""
    model = problem.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = mpikfac.KFAC(model, optimizer, comm, grafting=mpikfac.AdamGrafting(momentum=0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    images, labels = problem.batch(0)
    F.cross_entropy(model(images), labels).backward()
    before = problem.state(model)
    with pytest.raises(ValueError, match=r"needs an optimizer with momentum 0, not 0.95"):
        getattr(kfac, call)()
    assert torch.equal(problem.state(model), before)


@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
def test_a_layer_without_bases_keeps_the_momentum(comm, grafting):
    """Oracle: Nesterov's mean of the gradients by hand, along which the layer steps."""
    model, beta = nn.Linear(4, 3, bias=False), 0.8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grafting = replace(grafting, momentum=beta)
    kfac = mpikfac.KFAC(model, optimizer, comm, grafting=grafting)
    mean = torch.zeros(3, 4)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        gradient = model.weight.grad.clone()
        mean = beta * mean + (1 - beta) * gradient
        if step == 2:
            inside.bases(kfac).flat.fill_(math.nan)  # as after decompositions that failed
        before = model.weight.detach().clone()
        kfac.step()
    direction = beta * mean + (1 - beta) * gradient
    cosine = F.cosine_similarity((before - model.weight).flatten(), direction.flatten(), dim=0)
    assert cosine.item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
@pytest.mark.parametrize(
    "strategy", [None, Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))]
)
def test_uncovered_parameters_take_adams_step(comm, strategy, grafting):
    """Oracle: torch's Adam, on the gradients of the same steps; a NaN counts nowhere."""
    model, rate = problem.network(), 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    choices = problem.SETTINGS | {"grafting": grafting}
    kfac = problem.kfac(model, optimizer, comm, strategy, **choices)
    twins = [p.detach().clone() for p in model[1].parameters()]
    adam = torch.optim.Adam(twins, lr=rate, betas=(0.0, 0.999))
    for step in range(problem.STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(problem.batch(step)[0]), problem.batch(step)[1]).backward()
        if step == 1:
            model[1].bias.grad[0] = math.nan
        for twin, parameter in zip(twins, model[1].parameters()):
            twin.grad = parameter.grad.clone() if parameter.grad.isfinite().all() else None
        adam.step()
        kfac.step()
        for twin, parameter in zip(twins, model[1].parameters()):
            torch.testing.assert_close(parameter, twin)


@pytest.mark.parametrize(("bound", "length"), [(0.01, 0.01), (1e6, None)])
@pytest.mark.parametrize("grafting", [NoGrafting(), SGDGrafting()], ids=problem.label)
def test_the_norm_of_a_step_is_bounded(comm, grafting, bound, length):
    """Oracle: the norm of all layers' directions by hand; directions within the bound stay."""
    _, free, _ = directions(comm, grafting=grafting)
    _, found, kfac = directions(comm, grafting=grafting, norm_clip=bound)
    whole = math.sqrt(sum(float(d.square().sum()) for d in free.values()))
    scale = (length or whole) / whole
    assert (scale < 1) == (bound == 0.01)
    assert kfac.kl_scale.item() == pytest.approx(scale)
    for name, direction in free.items():
        torch.testing.assert_close(found[name], scale * direction)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("bound", ["kl_clip", "norm_clip"])
def test_a_direction_of_zeros_stays_where_it_is(comm, preconditioner, bound):
    """Oracle: the bits before: no gradient arrives behind weights of zeros, or anywhere."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "grafting": SGDGrafting(),
        "kl_clip": None,
        bound: 0.1,
        "preconditioner": preconditioner,
    }
    kfac = problem.kfac(model, optimizer, comm, **settings)
    before = model[0].weight.clone()
    F.cross_entropy(model(torch.randn(8, 6).double()), torch.arange(8) % 4).backward()
    kfac.step()
    assert torch.equal(model[0].weight, before)
    assert problem.state(model).isfinite().all()
    before = problem.state(model)
    optimizer.zero_grad()
    (0 * model(torch.randn(8, 6).double())).sum().backward()
    kfac.step()
    assert torch.equal(problem.state(model), before)


@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_the_fisher_norm_of_a_direction_is_bounded(comm, bound):
    """Oracle: `sqrt(sum <direction, gradient>)` over all layers by hand."""
    gradients, free, _ = directions(comm)
    _, found, kfac = directions(comm, fisher_clip=bound)
    whole = math.sqrt(sum(float((free[n] * g).sum()) for n, g in gradients.items()))
    scale = min(1.0, bound / whole)
    assert (scale < 1) == (bound == 0.01)
    assert kfac.kl_scale.item() == pytest.approx(scale)
    for name, direction in free.items():
        torch.testing.assert_close(found[name], scale * direction)


@pytest.mark.parametrize(("bound", "ratio"), [("fisher_clip", 10.0), ("kl_clip", 1.0)])
def test_a_bound_on_the_direction_leaves_the_learning_rate_its_meaning(comm, bound, ratio):
    """Oracle: by hand: with a tenth of the rate the KL clip makes the same step."""
    steps = []
    for rate in (0.1, 0.01):
        model = problem.network()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        settings = {**problem.SETTINGS, "kl_clip": None, bound: 1e-6}
        kfac = problem.kfac(model, optimizer, comm, **settings)
        before = model[0].weight.clone()
        F.cross_entropy(model(problem.batch(0)[0]), problem.batch(0)[1]).backward()
        kfac.step()
        assert kfac.kl_scale < 1
        steps.append((model[0].weight - before).norm().item())
    assert steps[0] / steps[1] == pytest.approx(ratio)


def test_without_a_choice_directions_are_orthogonal(comm):
    """Oracle: the choices, and with a clip the length that preconditioning gives."""
    model = problem.network()
    kfac = mpikfac.KFAC(model, problem.sgd(model), comm)
    chosen = inside.settings(kfac)
    assert (chosen.grafting, chosen.clip) == (AdamGrafting(orthogonalize=True), None)
    assert chosen.damping.is_relative
    clipped = mpikfac.KFAC(model, problem.sgd(model), comm, clip=KLClip())
    assert inside.settings(clipped).grafting == NoGrafting()
    vectors = mpikfac.KFAC(model, problem.sgd(model), comm, preconditioner="eva")
    assert inside.settings(vectors).damping == mpikfac.Damping(0.003)


@pytest.mark.parametrize("grafting", [SGDGrafting(), *problem.BY_ADAM], ids=problem.label)
def test_a_layer_without_a_basis_is_stepped_by_its_gradient(comm, monkeypatch, grafting):
    """Oracle: the gradient, at the grafted length: own length, or the length of Adam's step."""

    def failing(factor, damping):
        raise ArithmeticError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(numerics, "damped_inverse", failing)
        unlimited = replace(grafting, max_trust_ratio=math.inf) if grafting.by_adam else grafting
        gradients, found, kfac = directions(comm, preconditioner="inverse", grafting=unlimited)
    assert kfac.nonfinite.counts["decomposition"] == 6
    for name, gradient in gradients.items():
        first = gradient / (gradient.abs() + 1e-8)  # Adam's first step
        length = (first if grafting.by_adam else gradient).norm()
        torch.testing.assert_close(found[name], gradient / gradient.norm() * length)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(
            ({"norm_clip": value, "kl_clip": None}, f"max_norm={value!r} must be")
            for value in (-1, 0, math.nan, math.inf, "0.1")
        ),
        ({"grafting": "lamb"}, "grafting='lamb' must be None or mpikfac.AdamGrafting"),
        (
            {"grafting": AdamGrafting},
            "must be None or mpikfac.AdamGrafting",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(comm, settings, text):
    model = problem.network()
    with pytest.raises(ValueError, match=re.escape(text)):
        problem.kfac(model, problem.sgd(model), comm, **settings)


def test_the_bound_may_be_a_schedule(comm):
    """Oracle: the norm at every step by hand."""
    model = problem.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bound = mpikfac.schedule.linear(0.01, 0.001, 3)
    kfac = problem.kfac(model, optimizer, comm, kl_clip=None, norm_clip=bound)
    for step in range(4):
        problem.run(kfac, comm, [step])
        written = [
            oracles.gradient_matrix(module) for module in oracles.kfac_modules(model).values()
        ]
        whole = torch.cat([matrix.flatten() for matrix in written])
        assert whole.norm().item() == pytest.approx(bound(step))
