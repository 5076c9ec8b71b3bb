from __future__ import annotations

import gc
import itertools
import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import Compression, HybridOpt, Int8, MemOpt, SGDGrafting, Strategy
from mpikfac.layers import in_words
from mpikfac.numerics import triangles
from mpikfac.settings import schedule
from support import inside, oracles, problem
from support.strategies import changed


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=False)).double()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def learn(kfac, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(10, 6, generator=generator).double()
    kfac.optimizer.zero_grad()
    F.cross_entropy(kfac.model(x), torch.arange(10) % 4).backward()
    return kfac.model[0].weight.grad.clone()


def factor(kfac, name):
    return triangles.unfold_triangle(kfac.state_dict()[f"kfac/factors/{name}"])


@pytest.mark.parametrize(
    ("preconditioner", "start"),
    [
        *itertools.product(["eigen", "inverse", problem.UNSPLIT], ["first", "identity"]),
        ("eva", "first"),
    ],
)
@pytest.mark.parametrize("clip", [{"kl_clip": 0.001}, {"kl_clip": None, "damping": 1.0}])
def test_training_is_the_textbooks(comm, preconditioner, start, clip):
    """Oracle: im2col factors, written-out averages, dense solves and the clip's formula."""
    settings = problem.SETTINGS | {"preconditioner": preconditioner, "initial_factor": start} | clip
    expected = problem.network()
    steps = [problem.shards(step, 1) for step in range(problem.STEPS)]
    scales = oracles.train(expected, problem.sgd(expected), steps, **settings)
    assert clip["kl_clip"] is None or max(scales) < 1  # or it would not be tested

    model = problem.network()
    kfac = problem.kfac(model, problem.sgd(model), comm, **settings)
    found = problem.run(kfac, comm)
    torch.testing.assert_close(found, problem.state(expected), rtol=0, atol=1e-10)
    assert kfac.kl_scale.item() == pytest.approx(scales[-1])
    assert kfac.steps == problem.STEPS


def test_new_damping_needs_no_new_basis(comm):
    """Oracle: the dense solve with the old factors and the damping of the step."""
    damping = schedule.step_decay(0.1, at=[2], factor=0.01)
    model = linear()
    settings = {
        "inv_update_steps": 100,
        "factor_update_steps": 100,
        "kl_clip": None,
        "preconditioner": "eigen",
    }
    kfac = problem.kfac(model, sgd(model, lr=0), comm, damping=damping, **settings)
    for step in range(4):
        gradient = learn(kfac, step)
        kfac.precondition()
        expected = oracles.kronecker_solve(
            gradient, factor(kfac, "0.A"), factor(kfac, "0.G"), damping(step)
        )
        torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-10, atol=1e-10)
    assert kfac.trace.calls["decompose"] == 1


def test_new_damping_of_inverses_waits_for_the_next_decomposition(comm):
    """Oracle: the dense solve with the damping of the last multiple of `inv_update_steps`."""
    model = linear()
    settings = {
        "inv_update_steps": 2,
        "factor_update_steps": 100,
        "kl_clip": None,
        "preconditioner": "inverse",
    }
    kfac = problem.kfac(model, sgd(model), comm, damping=lambda step: 0.1 + step, **settings)
    for step in range(4):
        gradient = learn(kfac, step)
        kfac.precondition()
        expected = oracles.tikhonov_solve(
            gradient, factor(kfac, "0.A"), factor(kfac, "0.G"), 0.1 + step // 2 * 2
        )
        torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("factor_update_steps", "inv_update_steps", "factors", "bases"),
    [
        (1, 1, range(12), range(12)),
        (1, 5, range(12), [0, 5, 10]),
        (5, 1, [0, 5, 10], range(12)),
        (2, 3, [0, 2, 4, 6, 8, 10], [0, 3, 6, 9]),
        (lambda step: 1 if step < 3 else 6, 4, [0, 1, 2, 6], [0, 4, 8]),
    ],
)
def test_factors_and_bases_have_their_own_intervals(
    comm, factor_update_steps, inv_update_steps, factors, bases
):
    """Oracle: the multiples by hand, seen in how often a stage ran."""
    intervals = {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
    model = linear()
    kfac = problem.kfac(model, sgd(model), comm, **intervals)
    calls = []
    for step in range(12):
        learn(kfac, step)
        kfac.step()
        calls.append((kfac.trace.calls["statistics"], kfac.trace.calls["decompose"]))
        kfac.trace.clear()
    assert [step for step, (seen, _) in enumerate(calls) if seen] == list(factors)
    assert [step for step, (_, seen) in enumerate(calls) if seen] == list(bases)


@pytest.mark.parametrize("normalization", ["expand", "sc20", "kfac-pytorch"])
@pytest.mark.parametrize(("subsample", "examples"), [(3, [0, 3, 6, 9]), (20, [0])])
def test_a_subsample_estimates_the_batchs_factors(comm, subsample, examples, normalization):
    """Oracle: factors of a batch of the chosen examples only, in equally many copies.

    The loss is a sum over examples: an example's gradient does not depend on the rest.
    """

    def trained(images, **settings):
        model = problem.network()
        choices = problem.SETTINGS | settings | {"normalization": normalization}
        choices["factor_update_steps"] = 1  # the first choice begins with the first example
        kfac = problem.kfac(model, problem.sgd(model), comm, **choices)
        model(images).square().sum().backward()
        kfac.step()
        return inside.factors(kfac).flat

    images, _ = problem.batch(0)
    copies = images[examples].repeat_interleave(len(images) // len(examples), 0)
    expected = trained(copies)
    torch.testing.assert_close(trained(images, subsample=subsample), expected)


def test_a_scheduled_decay_weighs_each_factor_by_its_own_step(comm):
    """Oracle: numerator and weight of the average, step by step."""
    model = linear()
    kfac = problem.kfac(model, sgd(model), comm, factor_decay=lambda step: step / (step + 1))
    total, weight = 0, 0
    for step in range(4):
        learn(kfac, step)
        x = torch.randn(10, 6, generator=torch.Generator().manual_seed(step)).double()
        decay = step / (step + 1)
        total = decay * total + (1 - decay) * x.T @ x / 10
        weight = decay * weight + 1 - decay
        kfac.step()
        torch.testing.assert_close(factor(kfac, "0.A"), total / weight)


def test_an_interrupted_run_goes_on_to_the_last_bit(comm):
    """Oracle: the uninterrupted run; the resumed run stops between two decompositions."""

    def fresh():
        model = problem.network()
        return problem.kfac(model, problem.sgd(model), comm, **problem.SETTINGS)

    first, second = fresh(), fresh()
    problem.run(first, comm, range(2))
    second.load_state_dict(first.state_dict())
    expected = problem.run(first, comm, range(2, problem.STEPS))
    assert torch.equal(problem.run(second, comm, range(2, problem.STEPS)), expected)
    assert second.steps == problem.STEPS


def test_another_preconditioner_makes_its_own_bases_of_loaded_factors(comm):
    """Oracle: the dense solve with the loaded factors; only decompositions are repeated."""
    model = linear()
    kfac = problem.kfac(model, sgd(model), comm, kl_clip=None, preconditioner="eigen")
    learn(kfac, 0)
    kfac.step()
    settings = {
        "factor_update_steps": 100,
        "inv_update_steps": 100,
        "kl_clip": None,
        "damping": 0.01,
    }
    model = linear()
    other = problem.kfac(model, sgd(model), comm, preconditioner="inverse", **settings)
    other.load_state_dict(kfac.state_dict())
    gradient = learn(other, 1)
    other.precondition()
    expected = oracles.tikhonov_solve(gradient, factor(kfac, "0.A"), factor(kfac, "0.G"), 0.01)
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-10, atol=1e-10)
    assert other.trace.calls["statistics"] == 0


def test_another_estimators_factors_are_left_where_they_are(comm):
    """Oracle: the dense solve with vectors of the new batch alone; then K-FAC's next batch."""
    model = linear()
    kfac = problem.kfac(model, sgd(model), comm, kl_clip=None)
    learn(kfac, 0)
    kfac.step()
    settings = {
        "factor_update_steps": 100,
        "inv_update_steps": 100,
        "kl_clip": None,
        "damping": 0.01,
    }
    model = linear()
    eva = problem.kfac(model, sgd(model), comm, preconditioner="eva", **settings)
    eva.load_state_dict(kfac.state_dict())
    gradient = learn(eva, 1)
    eva.precondition()
    found = eva.state_dict()
    vectors = found["kfac/vectors/0.A"], found["kfac/vectors/0.G"]
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(vectors[0], x.mean(0))
    expected = oracles.eva_solve(gradient, *vectors, 0.01)
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-10, atol=1e-10)
    kfac.load_state_dict(found)
    learn(kfac, 2)
    kfac.step()
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(2)).double()
    torch.testing.assert_close(factor(kfac, "0.A"), x.T @ x / 10)


def test_a_first_order_run_goes_on_with_kfac(comm):
    """Oracle: statistics and bases are made at once, at any intervals."""
    first_order = linear()
    baseline = mpikfac.FirstOrderTrainer(first_order, sgd(first_order, momentum=0.9), comm)
    learn(baseline, 0)
    baseline.step()
    model = linear()
    kfac = mpikfac.KFAC(
        model, sgd(model, momentum=0.9), comm, factor_update_steps=100, inv_update_steps=100
    )
    kfac.load_state_dict(baseline.state_dict())
    assert torch.equal(model[0].weight, first_order[0].weight)
    learn(kfac, 1)
    kfac.step()
    assert kfac.steps == 2
    assert kfac.trace.calls["statistics"] == kfac.trace.calls["decompose"] == 1


def test_what_no_layer_covers_is_logged_once(comm, caplog):
    caplog.set_level(logging.INFO, "mpikfac")
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    kfac = problem.kfac(model, sgd(model), comm, skip=["2"], grafting=SGDGrafting())
    learn(kfac, 0)
    kfac.step()
    first_order, cost = caplog.messages
    assert first_order == (
        "trained first-order, because no layer covers them: "
        "BatchNorm1d 1 (weight, bias); Linear 2 (weight, bias)"
    )
    assert cost.startswith("K-FAC: ")


def test_parameters_are_named_in_words():
    """Oracle: by hand; a parameter of the model itself, and a long list."""
    model = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(11)))
    model.register_parameter("shift", nn.Parameter(torch.zeros(2)))
    words = in_words(model, ["shift", "0.weight", "3.weight"])
    assert words == "Sequential (shift); BatchNorm1d 0 and 3 (weight)"
    names = [name for name, _ in model.named_parameters() if name != "shift"]
    assert in_words(model, names) == (
        "BatchNorm1d 0, 1, 2, 3, 4, 5, 6, 7 and 3 more (weight, bias)"
    )


def test_what_is_frozen_stays(comm):
    """Oracle: the bits before; a frozen bias is no coordinate of A."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    frozen = [model[0].bias, model[1].weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen]
    trained = [model[0].weight, model[1].bias]
    start = [parameter.detach().clone() for parameter in trained]
    kfac = mpikfac.KFAC(model, sgd(model, weight_decay=0.1), comm)
    x = torch.randn(10, 6).double()
    F.cross_entropy(model(x), torch.arange(10) % 4).backward()
    kfac.step()
    assert all(map(torch.equal, frozen, before))
    assert not any(map(torch.equal, trained, start))
    torch.testing.assert_close(factor(kfac, "0.A"), x.T @ x / 10)


def test_precondition_leaves_the_step_to_the_caller(comm):
    """Oracle: `step` on a model with the same gradients."""
    one, two = problem.network(), problem.network()
    whole = problem.kfac(one, problem.sgd(one), comm, **problem.SETTINGS)
    habit = problem.kfac(two, problem.sgd(two), comm, **problem.SETTINGS)
    for step in range(3):
        problem.run(whole, comm, [step])
        images, labels = problem.batch(step)
        habit.optimizer.zero_grad()
        F.cross_entropy(two(images), labels).backward()
        habit.precondition()
        habit.optimizer.step()
    assert torch.equal(problem.state(two), problem.state(one))


@pytest.mark.parametrize(
    "choice",
    [
        {"assignment.shard_optimizer": True},
        {"transport.overlap": True},
        {"transport.virtual_ranks": 1},
    ],
)
def test_precondition_refuses_gradients_that_are_not_the_callers(comm, choice):
    model = linear()
    kfac = mpikfac.KFAC(model, sgd(model), comm, changed(Strategy(MemOpt()), choice))
    learn(kfac, 0)
    with pytest.raises(ValueError, match="cannot average gradients or take the step; call step"):
        kfac.precondition()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(
            ({name: value}, f"{name}={value!r} must be")
            for name in (
                "damping",
                "kl_clip",
                "factor_decay",
                "factor_update_steps",
                "inv_update_steps",
            )
            for value in (-1, math.nan, math.inf, "0.1")
        ),
        ({"damping": 0}, "damping=0 must be positive"),
        ({"kl_clip": 0.0}, "kl_clip=0.0 must be positive"),
        ({"factor_decay": 1.0}, "factor_decay=1.0 must be at least 0 and below 1"),
        (
            {"factor_update_steps": 0},
            "factor_update_steps=0 at step 0 must be a whole number >= 1",
        ),
        (
            {"inv_update_steps": 2.5},
            "inv_update_steps=2.5 at step 0 must be a whole number >= 1",
        ),
        ({"damping": lambda step: -1.0}, "schedule damping at step 0=-1.0 must be"),
        (
            {"preconditioner": "cg"},
            "preconditioner='cg' must be one of 'eigen', 'ekfac', 'inverse', 'eva'",
        ),
        ({"normalization": "x"}, "normalization='x' must be one of 'expand', 'sc20', "),
        ({"initial_factor": "zero"}, "initial_factor='zero' must be one of 'first', 'identity'"),
        ({"subsample": 0}, "subsample=0 must be a whole number >= 1"),
        ({"subsample": 2.0}, "subsample=2.0 must be a whole number >= 1"),
        ({"statistics_dtype": torch.float16}, "statistics_dtype=torch.float16 must be one of"),
        ({"factor_dtype": torch.float16}, "factor_dtype=torch.float16 must be one of"),
        ({"basis_dtype": "bfloat16"}, "dtype='bfloat16' must be one of None, torch.bfloat16"),
        (
            {
                "basis_dtype": torch.bfloat16,
                "strategy": Strategy(MemOpt(), compression=Compression(inverses=Int8())),
            },
            "preconditioner.dtype=torch.bfloat16 needs compression.inverses=None, not 'int8'",
        ),
        *(
            (
                {"preconditioner": "eva", **more},
                f"preconditioner='eva' needs {next(iter(more))}=",
            )
            for more in (
                {"initial_factor": "identity"},
                {"statistics_dtype": torch.bfloat16},
                {"factor_dtype": torch.bfloat16},
            )
        ),
        ({"skip": ["1"]}, "skip names '1', which is not a module of the model"),
        (
            {"strategy": Strategy(HybridOpt(grad_workers=2))},
            "grad_workers=2 must divide the number of ranks (1); try one of [1]",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(comm, settings, text):
    model = linear()
    with pytest.raises(ValueError, match=re.escape(text)):
        problem.kfac(model, sgd(model), comm, **settings)


def test_a_schedule_that_turns_bad_is_named_with_its_step(comm):
    model = linear()
    damping = {0: 0.1, 1: math.nan}
    kfac = mpikfac.KFAC(model, sgd(model), comm, damping=damping.get)
    learn(kfac, 0)
    kfac.step()
    learn(kfac, 1)
    with pytest.raises(ValueError, match="schedule damping at step 1=nan must be"):
        kfac.step()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"damping": mpikfac.schedule.linear(0.1, 0.0, 1)},
            "damping=0.0 at step 1 must be positive",
        ),
        (
            {"factor_decay": lambda step: 0.5 + step},
            "decay=1.5 at step 1 must be at least 0 and below 1",
        ),
        ({"kl_clip": lambda step: 0.1 * (step < 1)}, "kl_clip=0.0 at step 1 must be positive"),
    ],
)
def test_a_schedule_is_checked_at_every_step(comm, settings, text):
    """Oracle: the message; a damping of 0 would make the weights NaN."""
    model = linear()
    kfac = problem.kfac(model, sgd(model), comm, **settings)
    learn(kfac, 0)
    kfac.step()
    learn(kfac, 1)
    with pytest.raises(ValueError, match=re.escape(text)):
        kfac.step()


@pytest.mark.parametrize("preconditioner", ["inverse", "eigen", "ekfac", "eva"])
def test_later_steps_keep_no_more_than_earlier_ones(comm, preconditioner):
    """Oracle: the bytes behind all existing tensors, after one and after three intervals."""

    def held():
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        tensors = [t for t in tensors if t.layout == torch.strided]  # others are of other tests
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    model = problem.network()
    settings = problem.SETTINGS | {"preconditioner": preconditioner}
    kfac = problem.kfac(model, problem.sgd(model), comm, **settings)
    problem.run(kfac, comm, range(6))
    gc.collect()
    before = held()
    problem.run(kfac, comm, range(6, 18))
    gc.collect()
    assert held() <= before  # garbage of earlier tests may have been freed


def test_loading_forgets_the_batch_at_hand(comm):
    """Oracle: a trainer that is new when it loads the same state."""
    models = [linear() for _ in range(3)]
    first, used, new = (mpikfac.KFAC(model, sgd(model), comm) for model in models)
    learn(first, 0)
    first.step()
    learn(used, 1)
    for kfac in (used, new):
        kfac.load_state_dict(first.state_dict())
        kfac.optimizer.zero_grad()
        learn(kfac, 2)
        kfac.step()
    assert torch.equal(problem.state(used.model), problem.state(new.model))


def test_rates_of_weight_and_bias_count_in_the_clip(comm):
    """Oracle: the clip's formula with every parameter's own learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4)).double()
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())]
    kfac = problem.kfac(model, torch.optim.SGD(groups), comm, kl_clip=1e-6)
    learn(kfac, 0)
    gradients = [p.grad.clone() for p in model.parameters()]
    kfac.step()
    directions = [p.grad / kfac.kl_scale for p in model.parameters()]
    divergence = sum(
        (d * g).sum() * group["lr"] ** 2 for d, g, group in zip(directions, gradients, groups)
    )
    torch.testing.assert_close(kfac.kl_scale[0], torch.sqrt(1e-6 / divergence))
