"""Directions that are recorded once and replayed, as a CUDA graph would be."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import AdamGrafting, AdamInEigenbases, NoGrafting, SGDGrafting
from support import inside, problem
from support.replay import Recorder

PRECONDITIONERS = "inverse", problem.UNSPLIT, "eigen", "ekfac", "eva"
ADAM, ORTHOGONAL, ROWS = problem.BY_ADAM
GRAFTINGS = NoGrafting(), SGDGrafting(), ADAM, ORTHOGONAL, ROWS
OF_GRADIENT = [
    ("shampoo", ADAM),
    ("soap", AdamInEigenbases(momentum=0.0)),
    ("muon", ORTHOGONAL),
    ("normuon", ROWS),
]
STEPS = 14


@pytest.fixture
def recorder(monkeypatch):
    """Return what records on the device of the tests."""
    recorder = Recorder()
    monkeypatch.setattr(*inside.PLACES["records"], {problem.DEVICE.type: recorder})
    return recorder


def trained(comm, capture, happen=lambda step, kfac, scaler: None, scaler=None, **settings):
    """Return the state after steps with statistics, refreshes and what `happen` does before."""
    model = problem.network()
    relative = settings.get("preconditioner") != "eva"
    choices = {
        "damping": 0.1,
        "relative_damping": relative,
        "factor_update_steps": 2,
        "inv_update_steps": 5,
    }
    kfac = problem.kfac(
        model,
        torch.optim.SGD(model.parameters(), lr=0.002),
        comm,
        cuda_graph=capture,
        **choices,
        **settings,
    )
    for step in range(STEPS):
        images, labels = problem.batch(step)
        happen(step, kfac, scaler)
        loss = F.cross_entropy(model(images), labels)
        (scaler.scale(loss) if scaler else loss).backward()
        kfac.step(scaler)
        kfac.optimizer.zero_grad(set_to_none=step % 3 == 0)
    return problem.state(model)


@pytest.mark.parametrize(
    ("preconditioner", "grafting"),
    [*itertools.product(PRECONDITIONERS, GRAFTINGS), *OF_GRADIENT],
    ids=problem.label,
)
def test_replays_change_no_bit(comm, recorder, preconditioner, grafting):
    """Oracle: the same training without replays."""
    settings = {"preconditioner": preconditioner, "grafting": grafting}
    found = trained(comm, True, **settings)
    assert recorder.recordings == 1 and recorder.replays == STEPS - 2
    assert torch.equal(found, trained(comm, False, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"grafting": AdamGrafting(momentum=0.9)},
        {"grafting": AdamGrafting(normalize_rows=True, momentum=0.9)},
        {"grafting": AdamInEigenbases(momentum=0.9), "preconditioner": "soap"},
        {"grafting": AdamGrafting(orthogonalize=False, momentum=0.9, max_trust_ratio=0.01)},
        {"grafting": NoGrafting(), "kl_clip": 0.001},
        {"grafting": AdamGrafting(), "norm_clip": 0.1},
    ],
    ids=str,
)
def test_momentum_and_bounds_are_right_in_replays(comm, recorder, settings):
    """Oracle: the same training without replays."""
    settings = {"preconditioner": "eigen"} | settings
    found = trained(comm, True, **settings)
    assert recorder.replays == STEPS - 2
    assert torch.equal(found, trained(comm, False, **settings))


def breaks(step, kfac, _):
    if step in (5, 9, 10):
        kfac.model[0].weight.register_hook(
            lambda g, at=step: g * float("nan") if kfac.steps == at else None
        )


def freezes(step, kfac, _):
    if step in (4, 8):
        kfac.model[-1].weight.requires_grad_(step == 8)


def loads(step, kfac, _):
    if step == 7:
        kfac.load_state_dict(copy.deepcopy(kfac.state_dict()))


def moves(step, kfac, _):
    if step == 6:
        for parameter in kfac.model.parameters():
            parameter.data = parameter.data.clone()


def overflows(step, kfac, scaler):
    if step in (3, 8):
        scaler.update(float("inf"))
    elif step in (4, 9):
        scaler.update(2.0)


@pytest.mark.parametrize("happen", [breaks, freezes, loads, moves])
@pytest.mark.parametrize(
    ("preconditioner", "grafting"),
    [("inverse", ADAM), ("inverse", ORTHOGONAL), *OF_GRADIENT[1::2]],
    ids=problem.label,
)
def test_unusual_steps_run_beside_replays(comm, recorder, happen, preconditioner, grafting):
    """Oracle: the same training without replays."""
    grafting = replace(grafting, max_trust_ratio=0.01)
    settings = {"preconditioner": preconditioner, "grafting": grafting}
    found = trained(comm, True, happen, **settings)
    assert 0 < recorder.replays < STEPS - 2 or happen is loads
    assert torch.equal(found, trained(comm, False, happen, **settings))


def test_skipped_steps_of_a_scaler(comm, recorder):
    """Oracle: the same training without replays; steps whose loss overflows are skipped."""
    states = []
    for capture in (True, False):
        scaler = torch.amp.GradScaler(problem.DEVICE.type, init_scale=2.0)
        states.append(trained(comm, capture, overflows, scaler, grafting=AdamGrafting()))
    assert recorder.replays > 0
    assert torch.equal(*states)


def schedule(step):
    """Return a number that changes every four steps."""
    return 0.1 / (1 + step // 4)


@pytest.mark.parametrize(("damping", "momentum"), [(schedule, 0.9), (0.1, schedule)])
@pytest.mark.parametrize("preconditioner", ["eigen", "eva", "soap"])
def test_schedules_are_in_force(comm, recorder, preconditioner, damping, momentum):
    """Oracle: the same training without replays; a number of the host is part of no replay."""
    model_states = []
    for capture in (True, False):
        model = problem.network()
        by_adam = AdamInEigenbases() if preconditioner == "soap" else ADAM
        kfac = mpikfac.KFAC(
            model,
            problem.plain_sgd(model),
            comm,
            preconditioner=preconditioner,
            grafting=replace(by_adam, momentum=momentum),
            cuda_graph=capture,
            damping=mpikfac.Damping(relative=damping) if preconditioner == "soap" else damping,
        )
        model_states.append(problem.run(kfac, comm, range(STEPS)))
    assert recorder.replays > 0
    assert torch.equal(*model_states)


def test_a_device_without_graphs_is_refused(comm, monkeypatch):
    """Oracle: the line."""
    monkeypatch.setattr(*inside.PLACES["records"], {})
    model = problem.network()
    with pytest.raises(ValueError, match="cuda_graph=True needs a model on an NVIDIA GPU, not on"):
        problem.kfac(model, problem.plain_sgd(model), comm, cuda_graph=True)


def test_a_cuda_graph_is_a_choice_of_two(comm):
    """Oracle: the line."""
    model = problem.network()
    with pytest.raises(ValueError, match="cuda_graph='yes' must be"):
        problem.kfac(model, problem.plain_sgd(model), comm, cuda_graph="yes")
