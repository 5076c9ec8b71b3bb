"""K-FAC from one constructor, used like a torch optimizer, and the uses that it rejects."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    KFAC,
    AdamGrafting,
    DistributedMuon,
    DistributedShampoo,
    Estimator,
    FirstOrderTrainer,
    KFACOptimizer,
    KLClip,
    NoGrafting,
    NormClip,
    SGDGrafting,
    schedule,
)
from mpikfac.plan import BASIS_EVERY, FACTOR_EVERY
from mpikfac.settings import MOMENTUM, RATE, WEIGHT_DECAY


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=generator).double(), torch.arange(8) % 3


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def by_hand(momentum: float | schedule.Schedule = MOMENTUM) -> KFAC:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), RATE, weight_decay=WEIGHT_DECAY)
    return KFAC(model, sgd, mpikfac.world(), grafting=AdamGrafting(momentum=momentum))


def train(optimizer: KFACOptimizer, steps: int = 25) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(optimizer.trainer.model, step).backward()
        optimizer.step()
    return [p.detach() for p in optimizer.trainer.model.parameters()]


def test_the_constructor_is_kfac_with_the_recommended_numbers():
    """Oracle: `KFAC` around SGD with the numbers by hand."""
    expected = by_hand()
    for step in range(25):
        expected.optimizer.zero_grad()
        loss_of(expected.model, step).backward()
        expected.step()
    optimizer = KFACOptimizer(network())
    for weights, right in zip(train(optimizer), expected.model.parameters()):
        torch.testing.assert_close(weights, right.detach(), rtol=1e-9, atol=1e-12)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == RATE


def test_groups_have_rates_and_decays_of_their_own():
    """Oracle: a frozen group stays; the weights of the rest move."""
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    groups = [
        {"params": model[0].parameters(), "lr": 0.0, "weight_decay": 0.0},
        {"params": model[2].parameters()},
    ]
    after = train(KFACOptimizer(model, params=groups), steps=2)
    moved = [not torch.equal(old, new) for old, new in zip(before, after)]
    assert moved == [False, False, True, True]


def test_one_cycle_changes_rate_and_momentum():
    """Oracle: `KFAC` by hand with the momentum of each step, from the scheduler's own groups."""
    optimizer, momenta = KFACOptimizer(network()), [0.95]
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=12)
    expected = by_hand(momentum=lambda step: momenta[step])
    for step in range(10):
        group = optimizer.param_groups[0]
        momenta[step:] = [group["momentum"]]
        expected.optimizer.param_groups[0]["lr"] = group["lr"]
        for trainer in (optimizer.trainer, expected):
            trainer.optimizer.zero_grad()
            loss_of(trainer.model, step).backward()
        optimizer.step()
        expected.step()
        cycle.step()
    assert min(momenta) < 0.9 < max(momenta)
    pairs = zip(optimizer.trainer.model.parameters(), expected.model.parameters())
    for weights, right in pairs:
        torch.testing.assert_close(weights, right, rtol=1e-9, atol=1e-12)


def test_a_scaler_steps_as_without_a_scaler():
    """Oracle: the same steps without a scaler; a scale of a power of 2 rounds nothing."""
    plain, scaled = KFACOptimizer(network()), KFACOptimizer(network())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=3)
    for step in range(8):
        for optimizer in (plain, scaled):
            optimizer.zero_grad()
        loss_of(plain.trainer.model, step).backward()
        plain.step()
        scaler.scale(loss_of(scaled.trainer.model, step)).backward()
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    for one, other in zip(plain.trainer.model.parameters(), scaled.trainer.model.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_scaler_skips_a_step_that_is_not_finite():
    """Oracle: the weights before, the scaler's own rule for its scale, and the next step."""
    optimizer, scaler = KFACOptimizer(network()), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in optimizer.trainer.model.parameters()]
    scaler.scale(math.inf * loss_of(optimizer.trainer.model)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for parameter, old in zip(optimizer.trainer.model.parameters(), before):
        assert torch.equal(parameter, old)
    after = train(optimizer, steps=1)
    assert not torch.equal(after[0], before[0])


def test_a_state_resumes_with_a_scheduler():
    """Oracle: the run without a break."""
    whole, first = KFACOptimizer(network()), KFACOptimizer(network())
    expected = train(whole, 5)
    train(first, 3)
    resumed = KFACOptimizer(network(), lr=0.5)
    resumed.trainer.model.load_state_dict(first.trainer.model.state_dict())
    resumed.load_state_dict(first.state_dict())
    for step in (3, 4):
        resumed.zero_grad()
        loss_of(resumed.trainer.model, step).backward()
        resumed.step()
    for weights, right in zip(resumed.trainer.model.parameters(), expected):
        assert torch.equal(weights, right)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"strategy": "mem_opt"}, "strategy='mem_opt' is unknown; did you mean 'mem-opt'"),
        ({"strategy": "none"}, "strategy='none' is unknown; the names are kfac-opt, kfac-lw"),
        ({"strategy": 4}, "strategy=4 must be a Strategy, the name of one, or None"),
        (
            {"comm": "comm-opt"},
            r"comm='comm-opt' must be a communicator of mpi4py, mpikfac.over\(group\), a SplitComm",
        ),
        ({"lr": -1.0}, "lr=-1.0 must be a finite number >= 0"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be a finite number"),
        ({"grafting": "adam"}, "grafting='adam' must be None or mpikfac.AdamGrafting"),
        ({"grafting": NoGrafting()}, r"momentum=0.9\) needs grafting=AdamGrafting"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, text):
    with pytest.raises(ValueError, match=text):
        KFACOptimizer(network(), **arguments)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        *(("dampng", "did you mean damping?"), ("momentun", "did you mean momentum?")),
        ("skip", "did you mean coverage=mpikfac.Coverage(skip=...)?"),
        (
            "fisher_type",
            "did you mean estimator=mpikfac.Estimator(fisher_type=...)?",
        ),
        ("max_trust_ratio", "did you mean grafting=mpikfac.AdamGrafting(max_trust_ratio=...)?"),
        ("kl_clip", "did you mean clip=mpikfac.KLClip(kl_clip=...)?"),
        ("nesterov", "see help(mpikfac.KFAC)"),
    ],
)
def test_an_unknown_argument_is_named(wrong, right):
    """Oracle: the line."""
    text = f"KFACOptimizer has no argument '{wrong}'; {right}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        KFACOptimizer(network(), **{wrong: 0.1})


def test_a_named_optimizer_takes_no_preconditioner_and_its_own_momentum():
    """Oracle: the lines; Muon's momentum of 0.95 [Jordan 2024], and a number that is given."""
    line = "'eigen' is not an argument of DistributedMuon, whose preconditioner is 'muon'; leave"
    with pytest.raises(ValueError, match=line):
        DistributedMuon(network(), preconditioner="eigen")
    with pytest.raises(TypeError, match="DistributedShampoo has no argument 'dampng'; did you"):
        DistributedShampoo(network(), dampng=0.1)
    made = [DistributedMuon(network()), KFACOptimizer(network(), preconditioner="muon")]
    made += [DistributedShampoo(network()), DistributedMuon(network(), momentum=0.5)]
    graftings = [AdamGrafting(max_trust_ratio=4.0), AdamGrafting(momentum=0.8)]
    made += [DistributedMuon(network(), grafting=grafting) for grafting in graftings]
    momenta = [optimizer.param_groups[0]["momentum"] for optimizer in made]
    assert momenta == [0.95, 0.95, MOMENTUM, 0.5, 0.95, 0.8]


def test_parameters_are_no_model():
    """Oracle: the line."""
    with pytest.raises(ValueError, match=r"model=generator must be a torch.nn.Module"):
        KFACOptimizer(network().parameters())


def test_a_name_brings_the_settings_of_the_strategy():
    """Oracle: the table of names."""
    model = network()
    assert KFACOptimizer(model).trainer.plan.preconditioner == "inverse"
    published = KFACOptimizer(model, strategy="kfac-opt").trainer
    assert published.plan.preconditioner == "eigen"
    assert KFACOptimizer(
        model, strategy="kfac-opt", preconditioner="inverse"
    ).trainer.plan.preconditioner == ("inverse")


def test_intervals_grow_until_step_160():
    """Oracle: the intervals by hand."""
    factors, bases = schedule.growing(FACTOR_EVERY), schedule.growing(BASIS_EVERY)
    steps = (0, 19, 20, 40, 80, 159, 160, 10**6)
    assert [factors(step) for step in steps] == [1, 1, 2, 4, 8, 8, 10, 10]
    assert [bases(step) for step in steps] == [5, 5, 10, 20, 40, 40, 50, 50]
    in_turns = schedule.growing(BASIS_EVERY, multiple=4)
    assert [in_turns(step) for step in steps] == [8, 8, 12, 20, 40, 40, 52, 52]


# -- habits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KFAC, FirstOrderTrainer])
def test_a_second_step_of_the_optimizer_is_refused(kind):
    """Oracle: the line; the weights after a single step; `detach` gives the optimizer back."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    trainer = kind(model, sgd)
    loss_of(model).backward()
    trainer.step()
    after = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"{kind.__name__}.step\(\) steps the optimizer itself"):
        sgd.step()
    for parameter, old in zip(model.parameters(), after):
        assert torch.equal(parameter, old)
    trainer.detach()
    sgd.step()


def test_a_caller_who_preconditions_steps_once():
    """Oracle: the line at the second step."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    kfac = KFAC(model, sgd)
    for _ in range(2):
        loss_of(model).backward()
        kfac.precondition()
        sgd.step()
    with pytest.raises(ValueError, match="would repeat the step"):
        sgd.step()


def test_a_trainer_that_is_gone_refuses_nothing():
    """Oracle: no error."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    first = FirstOrderTrainer(model, sgd)
    second = KFAC(model, sgd)
    loss_of(model).backward()
    second.step()  # though the first trainer is still there
    second.detach()
    first.detach()
    del first, second
    sgd.step()


@pytest.mark.parametrize(
    ("optimizer", "settings", "warning"),
    [
        (
            lambda p: torch.optim.SGD(p, 0.1),
            {"grafting": AdamGrafting()},
            "lr=0.1 is a learning rate for SGD; with AdamGrafting(",
        ),
        (lambda p: torch.optim.SGD(p, 0.1), {"grafting": SGDGrafting()}, ""),
        (lambda p: torch.optim.SGD(p, 0.0075), {"grafting": AdamGrafting(momentum=0.9)}, ""),
        (
            lambda p: torch.optim.AdamW(p, 0.001),
            {},
            "AdamW rescales K-FAC's directions by",
        ),
        (
            lambda p: torch.optim.SGD(p, 0.1),
            {"grafting": NoGrafting()},
            "NoGrafting() without a clip can div",
        ),
        (lambda p: torch.optim.SGD(p, 0.1), {"clip": NormClip(max_norm=0.1)}, ""),
        (lambda p: torch.optim.SGD(p, 0.1), {"clip": KLClip(kl_clip=0.001)}, ""),
    ],
)
def test_habits_that_let_kfac_lose_are_said(caplog, optimizer, settings, warning):
    """Oracle: the warnings."""
    model = network()
    with caplog.at_level(logging.WARNING, "mpikfac"):
        KFAC(model, optimizer(model.parameters()), **settings)
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if text.startswith(warning)] == texts
    assert len(texts) == bool(warning)


@pytest.mark.parametrize("preconditioner", ["shampoo", "kl-shampoo"])
@pytest.mark.parametrize("clip", [None, NormClip(max_norm=1.0)], ids=["no clip", "clip"])
def test_the_first_roots_of_one_gradient_make_long_directions(caplog, preconditioner, clip):
    """Oracle: the warning, and what it warns of: the second direction, beside the first; a clip.

    The first roots are of the first gradient alone, and stretch all of the second that is new.
    """
    model = network()
    sgd, own = torch.optim.SGD(model.parameters(), 0.0), {"grafting": NoGrafting(), "clip": clip}
    kfac = KFAC(model, sgd, preconditioner=preconditioner, inv_update_steps=5, **own)
    norms = []
    for step in range(2):
        loss_of(model, step).backward()
        kfac.step()
        gradients = [p.grad for p in model.parameters()]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        kfac.optimizer.zero_grad()
    line = f"the factors of '{preconditioner}' contain a single gradient at first"
    assert (line in caplog.text) == (clip is None)
    if clip is None:
        assert norms[1] > 2 * norms[0]
    else:
        assert max(norms) < 1 + 1e-9


@pytest.mark.parametrize(
    "taken", [copy.copy, copy.deepcopy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())]
)
def test_an_optimizer_is_neither_copied_nor_pickled(taken):
    """Oracle: one line that names `state_dict`, instead of a copy without K-FAC's state."""
    for optimizer in (KFACOptimizer(network()), mpikfac.Optimizer(by_hand())):
        with pytest.raises(TypeError, match=r"must not be copied or pickled: .* state_dict\(\)"):
            taken(optimizer)
        loss_of(optimizer.trainer.model).backward()
        optimizer.step()


@pytest.mark.parametrize("fisher_type", ["mc", "type-2", "forward-only"])
def test_other_fishers_may_have_their_own_length(caplog, fisher_type):
    """Oracle: no warning."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    KFAC(model, sgd, grafting=NoGrafting(), estimator=Estimator(fisher_type=fisher_type))
    assert not caplog.records


def test_a_scheduler_gives_no_momentum_where_none_is_taken():
    """Oracle: the line; without momentum, K-FAC keeps no means of gradients."""
    model = network()
    optimizer = KFACOptimizer(model, momentum=0)
    loss_of(model).backward()
    optimizer.step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=9)
    loss_of(model).backward()
    with pytest.raises(
        ValueError, match=r"KFACOptimizer\(momentum=0\) cannot use the momentum of a group"
    ):
        optimizer.step()
