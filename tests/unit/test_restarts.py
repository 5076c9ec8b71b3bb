"""A run that stops at an unusual moment and resumes exactly."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import MemOpt, Refresh, SGDGrafting, Strategy
from mpikfac.numerics import triangles
from support import inside, problem


class Words(nn.Module):
    """An embedding, which has no scales, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)))


def words():
    torch.manual_seed(0)
    return Words().double()


def trainer(comm, model, strategy=None, **settings):
    choices = problem.SETTINGS | {"kl_clip": None} | settings
    return problem.kfac(model, problem.sgd_all(model), comm, strategy, **choices)


def learn(kfac, step, scaler=None, spoil=1.0):
    """Take a step of the problem's network, or of words."""
    torch.manual_seed(step)
    x, y = problem.batch(step)
    if isinstance(kfac.model, Words):
        x = torch.randint(6, (len(y),))
        y = y % 3
    kfac.optimizer.zero_grad()
    loss = F.cross_entropy(kfac.model(x), y) * spoil
    (scaler.scale(loss) if scaler else loss).backward()
    kfac.step(scaler)


def assert_goes_on(comm, make, first, steps, **settings):
    """Save after `first`, then compare a resumed run with the run at every step of `steps`."""
    kfac, other = (trainer(comm, make(), **settings) for _ in range(2))
    first(kfac)
    other.load_state_dict(copy.deepcopy(kfac.state_dict()))
    for step in steps:
        learn(kfac, step)
        learn(other, step)
        assert torch.equal(problem.state(other.model), problem.state(kfac.model)), step
    assert not torch.equal(problem.state(kfac.model), problem.state(make()))


@pytest.mark.parametrize("start", ["first", "identity"])
@pytest.mark.parametrize("skips", [0, 1])
def test_before_the_first_factors(comm, start, skips):
    """Oracle: the uninterrupted run, whose first batches were skipped, or which had none."""

    def first(kfac):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(skips):
            learn(kfac, 0, scaler, spoil=math.inf)
        assert kfac.steps == skips

    assert_goes_on(
        comm, problem.network, first, (1, 2, 3, 4), initial_factor=start, factor_update_steps=5
    )


@pytest.mark.parametrize("stop", range(1, 9))
def test_scales_go_on_wherever_bases_are_on_their_way(comm, stop):
    """Oracle: the uninterrupted run; the embedding's share has pending bases and no scales."""

    def first(kfac):
        for step in range(stop):
            learn(kfac, step)

    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=1, stagger=2))
    settings = {"preconditioner": "ekfac", "factor_update_steps": 1, "inv_update_steps": 4}
    assert_goes_on(comm, words, first, range(stop, stop + 4), strategy=strategy, **settings)


def test_the_identity_weighs_alike_in_layers_that_come_later(comm):
    """Oracle: `decay^batches` of the identity, by the trace of a factor of gradients of zero."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.later = nn.Linear(4, 3), nn.Linear(4, 3)
            self.used = False

        def forward(self, x):
            return self.body(x) + (0 * self.later(x) if self.used else 0)

    kfac = trainer(
        comm, Late().double(), initial_factor="identity", factor_update_steps=1, factor_decay=0.9
    )
    for step in range(3):
        kfac.model.used = step > 0
        kfac.optimizer.zero_grad()
        F.cross_entropy(
            kfac.model(torch.randn(5, 4).double()), torch.tensor([0, 1, 2, 0, 1])
        ).backward()
        kfac.step()
    identity = triangles.unfold_triangle(inside.factors(kfac)["later.G"])
    torch.testing.assert_close(identity, 0.9**2 * torch.eye(3).double())


def test_lost_bases_on_their_way_are_missed(comm):
    """Oracle: the missing bases, for a state with some bases and for a state without any."""
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=2))
    kfac = trainer(comm, problem.network(), strategy, factor_update_steps=1, inv_update_steps=3)
    for step in range(4):
        learn(kfac, step)
    state = kfac.state_dict()
    begun = {name for name in state if name.startswith("kfac/decompositions/")}
    assert begun and not kfac.missing(state)
    some = {name for name in begun if "/0." in name}
    assert kfac.missing(state.keys() - some) == some
    assert kfac.missing(state.keys() - begun) == begun


@pytest.mark.parametrize(
    ("grafting", "is_consistent"),
    [(problem.BY_ADAM[0], False), (problem.BY_ADAM[1], False), (SGDGrafting(), True)],
    ids=problem.label,
)
def test_a_state_that_has_taken_the_next_gradient_is_not_intact(
    comm, monkeypatch, grafting, is_consistent
):
    """Oracle: whether any saved item changed before directions were sent."""

    def broken(*_):
        raise RuntimeError("a rank died")

    kfac = trainer(comm, problem.network(), grafting=grafting)
    learn(kfac, 0)
    before = {n: v.clone() for n, v in kfac.state_dict().items() if n.startswith("kfac/graft/")}
    monkeypatch.setattr(*inside.PLACES["publish gradients"], broken)
    with pytest.raises(RuntimeError, match="a rank died"):
        learn(kfac, 1)
    state = kfac.state_dict()
    assert all(torch.equal(state[n], v) for n, v in before.items()) == is_consistent
    assert kfac.is_consistent == is_consistent


def test_another_optimizers_state_is_refused(comm):
    """Oracle: a single line; the model keeps the old state."""
    kfac = trainer(comm, problem.network())
    learn(kfac, 0)
    model = problem.network()
    other = problem.kfac(model, torch.optim.AdamW(model.parameters()), comm, **problem.SETTINGS)
    with pytest.raises(mpikfac.UserError, match="'optimizer/name' must be AdamW; it is SGD"):
        other.load_state_dict(kfac.state_dict())
    assert torch.equal(problem.state(model), problem.state(problem.network()))


REFUSED = {
    "a side that it lacks": ({"sides": "AG"}, "sides='AG' for layer 'norm', which has 'A'"),
    "no side": ({"sides": ""}, "sides='' for layer 'norm', which has 'A'"),
    "another order": ({"outputs": 2}, "outputs=2 for layer 'norm', which has 1"),
    "scales": ({"rescaled": True}, "rescaled=True for layer 'words', which has False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layer_does_not_have_cannot_be_kept(comm, case):
    """Oracle: a single line, before training."""
    fields, message = REFUSED[case]
    name = "words" if case == "scales" else "norm"
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "norm": nn.LayerNorm(4)}).double()

    def rule(layer):
        return replace(layer, **fields) if layer.name == name else layer

    covers = {**mpikfac.KINDS, **mpikfac.NORMS}
    with pytest.raises(ValueError, match=f"the rule sets {message}"):
        trainer(comm, model, covers=covers, rule=rule, preconditioner="ekfac")


def test_momenta_that_a_scheduler_moves_are_part_of_the_state(comm):
    """Oracle: the uninterrupted run; the scheduler moves the first number of a tuple."""

    def make():
        model = problem.network()
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        kfac = problem.kfac(model, adam, comm, **problem.SETTINGS)
        return kfac, torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.01, total_steps=20)

    def run(kfac, schedule, steps):
        for step in steps:
            problem.run(kfac, comm, [step])
            schedule.step()
        return problem.state(kfac.model)

    (first, schedule), (second, later) = make(), make()
    run(first, schedule, range(5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    later.load_state_dict(schedule.state_dict())
    assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]
    ends = [run(first, schedule, range(5, 8)), run(second, later, range(5, 8))]
    assert torch.equal(*ends)
