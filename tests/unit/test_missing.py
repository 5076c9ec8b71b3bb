"""Parameters and layers without a gradient, which torch's optimizers leave alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import KFAC, FirstOrderTrainer

COMM = mpikfac.world()


class Heads(nn.Module):
    """A trunk and two heads, of which a pass takes some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor, taken: tuple[int, ...]) -> torch.Tensor:
        h = self.trunk(x).tanh()
        return sum(self.heads[number](h) for number in taken)


def learn(model: nn.Module, seed: int, taken: tuple[int, ...] = (0, 1)) -> None:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=made, dtype=torch.float64)
    F.cross_entropy(model(x, taken), torch.randint(3, (8,), generator=made)).backward()


@pytest.mark.parametrize("make", [KFAC, FirstOrderTrainer])
def test_a_parameter_without_a_gradient_moves_as_with_gradient_0(make):
    """Oracle: torch's SGD with gradients of 0; the figure of the page of assumptions."""
    model = Heads().double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    trainer = make(model, sgd, COMM)
    learn(model, 0)
    trainer.step()
    alone = copy.deepcopy(sgd)
    weight = alone.param_groups[0]["params"][4]
    before = weight.detach().clone()
    for step in (1, 2):
        sgd.zero_grad()
        learn(model, step, (0,))
        trainer.step()
        alone.zero_grad()
        weight.grad = torch.zeros_like(weight)
        alone.step()
    torch.testing.assert_close(model.heads[1].weight, weight)
    if make is FirstOrderTrainer:
        moved = (weight.detach() - before).norm() / before.norm()
        assert moved.item() == pytest.approx(0.1, abs=0.02)


def consume(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def forget(model: nn.Module) -> None:
    model.zero_grad()


@pytest.mark.parametrize("lose", [consume, forget])
def test_gradients_that_are_gone_before_a_step_are_warned_of_once(lose, caplog):
    """Oracle: the log; heads without a part are not named."""
    model = Heads().double()
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), 0.01), COMM, factor_update_steps=1)
    learn(model, 0, (0,))
    kfac.step()
    assert "gradients are gone" not in caplog.text
    consume(model) if lose is consume else None
    for step in (1, 2):
        model.zero_grad()
        learn(model, step, (0,))
        forget(model) if lose is forget else None
        kfac.step()
    told = [r.getMessage() for r in caplog.records if "gradients are gone" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("layer 'trunk' and 1 more have statistics")
