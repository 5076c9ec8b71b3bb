"""Settings, schedules and states accept the numbers of Python, numpy and torch as equals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    KFAC,
    AdamGrafting,
    CommOpt,
    Compression,
    Estimator,
    KFACOptimizer,
    KLClip,
    LevenbergMarquardt,
    MemOpt,
    Refresh,
    Strategy,
    Transport,
    schedule,
)
from mpikfac.lab import CenteredClipping, DiLoCo, Safeguard, TopK

COMM = mpikfac.world()
REALS = [
    np.float64,
    np.float32,
    np.float16,
    np.array,
    torch.tensor,
    lambda number: torch.tensor([number]),
    Fraction,
]
WHOLES = [np.int64, np.uint8, np.array, torch.tensor, lambda number: torch.tensor([number])]
HALF = 0.5  # all kinds hold the number without rounding


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def learn(trainer: KFAC, steps: range, **arguments) -> None:
    for step in steps:
        made = torch.Generator().manual_seed(step)
        x = torch.randn(8, 5, generator=made, dtype=torch.float64)
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(x), torch.arange(8) % 3).backward()
        trainer.step(**arguments)


def weights(trainer: KFAC) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def trained(kind, whole, scheduled: bool = False) -> torch.Tensor:
    """Return the weights after steps with settings whose numbers are of a kind."""

    def setting(number):
        return (lambda step: number) if scheduled else number

    model = network()
    rate = HALF if kind is Fraction else kind(HALF)  # torch takes no fraction
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = KFAC(
        model,
        optimizer,
        COMM,
        Strategy(CommOpt(), transport=Transport(fusion=whole(1))),
        damping=setting(kind(HALF)),
        factor_update_steps=setting(whole(2)),
        inv_update_steps=setting(whole(4)),
        grafting=AdamGrafting(
            orthogonalize=False, momentum=setting(kind(HALF)), max_trust_ratio=kind(HALF)
        ),
        estimator=Estimator(factor_decay=setting(kind(HALF)), subsample=whole(2)),
    )
    learn(trainer, range(4), max_norm=kind(HALF), examples=whole(8))
    return weights(trainer)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("kind", REALS)
def test_settings_take_real_numbers_of_all_kinds(kind, scheduled):
    """Oracle: the weights of Python's numbers, to the last bit."""
    assert torch.equal(trained(kind, int, scheduled), trained(float, int))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("whole", WHOLES)
def test_settings_take_whole_numbers_of_all_kinds(whole, scheduled):
    """Oracle: the weights of Python's numbers, to the last bit."""
    assert torch.equal(trained(float, whole, scheduled), trained(float, int))


@pytest.mark.parametrize("kind", REALS)
def test_choices_and_schedules_of_all_kinds_are_equal(kind):
    """Oracle: the same values of Python's numbers, in the text that ranks compare."""
    made = [
        [
            LevenbergMarquardt(damping_adaptation_interval=number(4), damping=real(HALF)),
            Strategy(MemOpt(), refresh=Refresh(stagger=number(2), tolerance=real(HALF))),
            Strategy(
                CommOpt(),
                compression=Compression(gradients=TopK(ratio=real(HALF))),
                transport=Transport(fusion=(number(1),)),
            ),
            [schedule.cosine(real(HALF), 0, number(9))(step) for step in range(9)],
            [schedule.warmup(real(HALF), number(9))(step) for step in range(9)],
            [schedule.step_decay(HALF, [number(3)], real(HALF))(step) for step in range(9)],
            schedule.constant(real(HALF))(0),
        ]
        for real, number in ((kind, np.int64), (float, int))
    ]
    assert repr(made[0]) == repr(made[1])


@pytest.mark.parametrize("kind", REALS[:-1])
def test_a_rate_of_any_kind_is_a_part_of_the_state(kind):
    """Oracle: the run without a stop, to the last bit; a scheduler makes the rate's kind."""
    runs = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        runs.append(KFAC(model, optimizer, COMM, damping=0.03, inv_update_steps=1))
    first, second = runs
    learn(first, range(2))
    first.optimizer.param_groups[0]["lr"] = kind(HALF)
    state = first.state_dict()
    assert state["optimizer/groups/0/lr"] == HALF
    assert type(state["optimizer/groups/0/lr"]) is float
    second.load_state_dict(state | {"optimizer/groups/0/lr": kind(HALF)})
    for run in runs:
        learn(run, range(2, 4))
    assert torch.equal(weights(first), weights(second))


def test_a_scheduler_of_numpy_survives_a_restart():
    """Oracle: the rate of the scheduler."""
    model = network()
    optimizer = KFACOptimizer(model, 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float32(0.5) ** step)
    F.cross_entropy(model(torch.ones(1, 5, dtype=torch.float64)), torch.tensor([0])).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.state_dict()["optimizer/groups/0/lr"] == optimizer.param_groups[0]["lr"]


def test_numbers_in_lists_are_a_part_of_the_state():
    """Oracle: the numbers; lists stay lists."""
    runs = []
    for betas in ([0.5, 0.75], [0.9, 0.999]):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.param_groups[0]["betas"] = betas
        runs.append(mpikfac.FirstOrderTrainer(model, optimizer, COMM))
    runs[1].load_state_dict(runs[0].state_dict())
    assert runs[1].optimizer.param_groups[0]["betas"] == [0.5, 0.75]


@pytest.mark.parametrize(
    "value", [torch.tensor([0.1, 0.2]), 1 + 1j, {"a": 1}, [[1, 2]], np.array([1, 2])]
)
def test_what_no_state_holds_is_named_once(value, caplog):
    """Oracle: the log; all that torch's optimizers hold is stored or a choice."""
    for group in ({}, {"scale": value}):
        model = network()
        optimizer = torch.optim.AdamW([{"params": model.parameters(), **group}], fused=False)
        mpikfac.FirstOrderTrainer(model, optimizer, COMM)
        assert ("0/scale" in caplog.text) == bool(group)
    assert caplog.text.count("not stored in states") == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AdamGrafting(max_trust_ratio="8"), "max_trust_ratio='8' must be a number above 0"),
        (
            lambda: AdamGrafting(max_trust_ratio=np.True_),
            "max_trust_ratio=True must be a number above 0",
        ),
        (lambda: KLClip(kl_clip=torch.tensor([1.0, 2.0])), "kl_clip=.* must be"),
        (
            lambda: LevenbergMarquardt(damping_adaptation_decay="x"),
            "damping_adaptation_decay='x' must be a number",
        ),
        (lambda: TopK(ratio="x"), "ratio='x' must be a number above 0"),
        (lambda: DiLoCo(outer_lr=None), "outer_lr=None must be a number above 0"),
        (lambda: CenteredClipping(radius="x"), "radius='x' must be a number above 0"),
        (lambda: Safeguard(threshold="x"), "threshold='x' must be a number above 0"),
        (lambda: Estimator(subsample=np.float32(2)), "subsample=2.0 must be a whole number"),
        (lambda: KFACOptimizer(network(), lambda step: 0.1), "lr=.* must be a finite number"),
    ],
)
def test_what_is_no_number_is_refused(make, text):
    """Oracle: one line that names the value."""
    with pytest.raises(ValueError, match=text) as refused:
        make()
    assert "\n" not in str(refused.value)
