"""K-FAC writes only the gradients that its optimizer uses; others find averaged gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import KFAC, AdamGrafting, KLClip, MemOpt, NoGrafting, SGDGrafting, Strategy

COMM = mpikfac.world()
LENGTHS = {
    "orthogonal": {"grafting": AdamGrafting()},
    "momentum": {"grafting": AdamGrafting(orthogonalize=False, momentum=0.9)},
    "sgd": {"grafting": SGDGrafting()},
    "own": {"grafting": NoGrafting()},
    "kl": {"clip": KLClip(kl_clip=0.001)},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.LayerNorm(6)
    return nn.Sequential(nn.Linear(5, 6), norm, nn.Tanh(), nn.Linear(6, 3)).double()


def passes(model: nn.Module, step: int) -> None:
    made = torch.Generator().manual_seed(step)
    model.zero_grad()
    x = torch.randn(8, 5, generator=made, dtype=torch.float64)
    F.cross_entropy(model(x), torch.arange(8) % 3).backward()


@pytest.mark.parametrize("how", ["step", "precondition"])
@pytest.mark.parametrize("length", LENGTHS)
def test_another_optimizer_finds_gradients(length, how):
    """Oracle: the gradients of autograd, to the last bit; the norms are the other optimizer's."""
    model = network()
    norm, layers = model[1], [*model[0].parameters(), *model[3].parameters()]
    optimizer = torch.optim.SGD(layers, lr=0.1)
    other = torch.optim.Adam(norm.parameters(), lr=0.01)
    kfac = KFAC(model, optimizer, COMM, damping=0.03, **LENGTHS[length])
    for step in range(3):
        passes(model, step)
        expected = [parameter.grad.clone() for parameter in norm.parameters()]
        before = [parameter.detach().clone() for parameter in norm.parameters()]
        getattr(kfac, how)()
        if how == "precondition":
            optimizer.step()
        assert all(map(torch.equal, (p.grad for p in norm.parameters()), expected))
        assert all(map(torch.equal, norm.parameters(), before))
        other.step()


def test_a_parameter_that_joins_the_optimizer_is_stepped_by_adam():
    """Oracle: a run whose optimizer has had the parameters from the start."""
    weights = []
    for late in (False, True):
        model = network()
        layers = [*model[0].parameters(), *model[3].parameters()]
        optimizer = torch.optim.SGD(layers if late else model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, COMM, damping=0.03)
        passes(model, 0)
        if late:
            optimizer.add_param_group({"params": [*model[1].parameters()]})
        kfac.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_what_the_optimizer_lacks_is_named(caplog):
    """Oracle: the log, once."""
    model = network()
    KFAC(model, torch.optim.SGD([*model[0].parameters(), *model[3].parameters()], lr=0.1), COMM)
    told = [text for text in caplog.messages if "the optimizer does not contain" in text]
    assert len(told) == 1 and "1.weight, 1.bias: no step changes them" in told[0]


@pytest.mark.parametrize("kind", [KFAC, mpikfac.FirstOrderTrainer])
def test_owners_step_nothing_that_the_optimizer_lacks(kind):
    """Oracle: the line."""
    model = network()
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[3].parameters()], lr=0.1)
    with pytest.raises(ValueError, match="needs '1.weight' in the optimizer"):
        kind(
            model,
            optimizer,
            COMM,
            Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
        )
