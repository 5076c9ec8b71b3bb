"""Losses that contain derivatives with respect to inputs are reported once; others are not."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint

import mpikfac
from support import inside

COMM = mpikfac.world()
TOLD = "derivatives of the network with respect to its inputs"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.LeakyReLU(), nn.Linear(6, 1))


def points(*shape: int) -> Tensor:
    return torch.rand(*(shape or (16,)), 2, requires_grad=True)


def slope(u: Tensor, x: Tensor, **ways) -> Tensor:
    return torch.autograd.grad(u.sum(), x, **ways)[0]


def trained(model: nn.Module, loss_of, steps: int = 3, **settings) -> mpikfac.KFACOptimizer:
    optimizer = mpikfac.KFACOptimizer(model, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(optimizer).backward()
        optimizer.step()
    return optimizer


# -- told ------------------------------------------------------------------------------------------


def burgers(optimizer) -> Tensor:
    x = points()
    u = optimizer.trainer.model(x)
    first = slope(u, x, create_graph=True)
    second = slope(first[:, 1], x, create_graph=True)[:, 1]
    return (first[:, 0] + u[:, 0] * first[:, 1] - 0.01 * second).square().mean()


def second_alone(optimizer) -> Tensor:
    x = points()
    first = slope(optimizer.trainer.model(x), x, create_graph=True)
    return slope(first[:, 1], x, create_graph=True).square().mean()


def of_tokens(optimizer) -> Tensor:
    x = points(4, 3)
    return slope(optimizer.trainer.model(x), x, create_graph=True).square().mean()


def checkpointed(optimizer) -> Tensor:
    x, model = points(), optimizer.trainer.model
    u = model[2:](checkpoint(model[:2], x, use_reentrant=False))
    return slope(u, x, create_graph=True).square().mean()


def of_critic(optimizer) -> Tensor:
    x, fake, real = points(), points(), points()
    model = optimizer.trainer.model
    norms = slope(model(x), x, create_graph=True).norm(dim=1)
    return model(fake).mean() - model(real).mean() + 10 * (norms - 1).square().mean()


def by_grad(optimizer) -> Tensor:
    model = optimizer.trainer.model
    slopes = vmap(grad(lambda x: model(x).squeeze()))(points())
    return slopes.square().mean() + model(points()).square().mean()


def by_jacrev(optimizer) -> Tensor:
    model = optimizer.trainer.model
    return vmap(jacrev(model))(points()).square().mean() + model(points()).square().mean()


@pytest.mark.parametrize("way", ["at once", "together"])
@pytest.mark.parametrize(
    "loss_of", [burgers, second_alone, of_tokens, checkpointed, of_critic, by_grad, by_jacrev]
)
def test_a_loss_with_derivatives_is_told_once(loss_of, way, monkeypatch, caplog):
    """Oracle: the log; the remedy is pasted."""
    inside.record(monkeypatch, way)
    trained(critic() if loss_of is of_critic else network(), loss_of)
    assert caplog.text.count(TOLD) == 1
    remedy = re.search(r"damping=(mpikfac\.Damping\([^)]*\))", caplog.text)
    assert remedy is not None
    caplog.clear()
    trained(network(), retained, damping=eval(remedy[1]))
    assert TOLD not in caplog.text


def test_a_loss_with_derivatives_is_told_where_labels_are_the_models(caplog):
    """Oracle: the log; factors of `record` lack the part, too."""

    def loss_of(optimizer) -> Tensor:
        x = points()
        u = optimizer.trainer.model(x)
        loss = u.square().mean() + slope(u, x, create_graph=True).square().mean()
        optimizer.trainer.record(u, "squared-error")
        return loss

    trained(network(), loss_of, estimator=mpikfac.Estimator(fisher_type="type-2"))
    assert caplog.text.count(TOLD) == 1


# -- not told --------------------------------------------------------------------------------------


def attacked(optimizer) -> Tensor:
    x, model = points(), optimizer.trainer.model
    step = slope(model(x).square(), x).sign()
    return model((x + 0.1 * step).detach()).square().mean()


def attacked_by_backward(optimizer) -> Tensor:
    x, model = points(), optimizer.trainer.model
    loss = model(x).square().mean()
    loss.backward(inputs=[x], retain_graph=True)
    return loss + model((x + x.grad.sign()).detach()).square().mean()


def attacked_by_transform(optimizer) -> Tensor:
    model = optimizer.trainer.model
    step = vmap(grad(lambda x: model(x).squeeze()))(points()).sign()
    return model((points() + 0.1 * step).detach()).square().mean()


def retained(optimizer) -> Tensor:
    x = points()
    u = optimizer.trainer.model(x)
    slope(u, x, retain_graph=True)
    return u.square().mean()


def left_out(optimizer) -> Tensor:
    x = points()
    u = optimizer.trainer.model(x)
    first = slope(u, x, create_graph=True)
    slope(first, x, create_graph=True)
    return u.square().mean() + first.detach().square().mean()


def looked_at(optimizer) -> Tensor:
    x = points()
    u = optimizer.trainer.model(x)
    slope(slope(u, x, create_graph=True), x, retain_graph=True)
    return u.square().mean()


def recomputed(optimizer) -> Tensor:
    model = optimizer.trainer.model
    return model[2:](checkpoint(model[:2], points(), use_reentrant=True)).square().mean()


def curvature_along(optimizer) -> Tensor:
    model = optimizer.trainer.model
    parameters = list(model.parameters())
    with optimizer.trainer.no_recording():
        loss = model(points()).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
        x = points()
        slope(model(x), x, create_graph=True).square().sum().backward(inputs=parameters)
    optimizer.zero_grad()
    return model(points()).square().mean()


@pytest.mark.parametrize(
    "loss_of",
    [
        *(attacked, attacked_by_backward, attacked_by_transform, retained, left_out, looked_at),
        *(recomputed, curvature_along),
    ],
)
def test_other_passes_are_not_told(loss_of, caplog):
    """Oracle: the log."""
    trained(network(), loss_of)
    assert TOLD not in caplog.text


def test_passes_of_record_are_not_told(caplog):
    """Oracle: the log; `record` runs passes of its own through the outputs."""

    def loss_of(optimizer) -> Tensor:
        u = optimizer.trainer.model(points())
        optimizer.trainer.record(u, "squared-error")
        return u.square().mean()

    trained(network(), loss_of, estimator=mpikfac.Estimator(fisher_type="type-2"))
    assert TOLD not in caplog.text


def test_the_model_keeps_no_hook_between_steps_with_factors():
    """Oracle: torch's lists of hooks, at a step without new factors."""
    model = network()
    trained(model, burgers, steps=2, factor_update_steps=10)
    assert not any(module._forward_hooks for module in model.modules())


class Attending(nn.Module):
    """An attention and a linear layer; calls as for `points()`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x.reshape(-1, 1, 2))
        return self.last(self.attention(rows, rows, rows)[0])[:, 0]


def slope_of(model, x):
    return grad(lambda x: model(x).sum())(x)


def of_weights(model, x):
    return grad(lambda weights: functional_call(model, weights, (x,)).sum())(
        dict(model.named_parameters())
    )


TRANSFORMS = {
    "grad": slope_of,
    "grad of weights": of_weights,
    "grad of detached weights": lambda model, x: grad(
        lambda weights: functional_call(model, weights, (x,)).sum()
    )({name: weight.detach() for name, weight in model.named_parameters()}),
    "grad of each example": lambda model, x: vmap(lambda x: of_weights(model, x[None]))(x),
    "vmap": lambda model, x: vmap(lambda x: model(x[None])[0])(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(len(x), 1).double()),
    "without autograd": lambda model, x: torch.no_grad()(slope_of)(model, x),
}


@pytest.mark.parametrize("beside", TRANSFORMS)
@pytest.mark.parametrize("kind", [Attending, partial(nn.Linear, 2, 1)], ids=["attention", "linear"])
def test_a_transform_beside_the_pass_runs_and_changes_nothing(kind, beside):
    """Oracle: the weights of a run without the transform, to the last bit; torch's own result."""
    weights = []
    for transform in (TRANSFORMS[beside], None):
        torch.manual_seed(0)
        model = kind().double()
        x = torch.randn(6, 2).double()
        optimizer = mpikfac.KFACOptimizer(model, factor_update_steps=1)
        for _ in range(2):
            optimizer.zero_grad()
            if transform is not None:
                found, expected = transform(model, x), transform(copy.deepcopy(model), x)
                torch.testing.assert_close(found, expected)
            model(x).square().mean().backward()
            optimizer.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*weights)


def test_a_pass_inside_of_a_transform_alone_is_refused_by_its_cause():
    """Oracle: the line names transforms."""
    model = nn.Linear(2, 1).double()
    optimizer = mpikfac.KFACOptimizer(model)
    vmap(model)(torch.randn(6, 2).double()).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"outside of torch\.func transforms"):
        optimizer.step()
