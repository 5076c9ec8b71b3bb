"""SOURCE in K-FAC's form: its limits, and the derivative of an unrolled training run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.lab import Curvature, Segment, influence, source
from support.curved import F64, losses, network, trained

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture
def problem():
    """Return a curvature, examples and queries."""
    torch.manual_seed(0)
    kfac = trained(network())
    kfac.model.eval()
    data = torch.randn(6, 2, 3, 3, dtype=F64), torch.randint(3, (6,))
    return Curvature.of(kfac), [data], tuple(tensor[:2] for tensor in data)


def test_a_long_segment_is_influence(problem):
    """Oracle: `1 / (s + wd (s + l))` by hand, which is influence with damping `wd l / (1 + wd)`."""
    curvature, examples, queries = problem
    damping, decay = 0.3, 0.05
    found = source([Segment(curvature, 1e6, damping, decay)], losses, examples, queries)
    expected = influence(curvature, losses, examples, queries, decay * damping / (1 + decay))
    torch.testing.assert_close(found, expected / (1 + decay), **EXACT)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_short_segment_is_the_product_with_the_direction(problem, weight_decay):
    """Oracle: one step: the preconditioned gradient of the query, times the learning rate."""
    curvature, examples, queries = problem
    found = source([Segment(curvature, 1e-9, 0.2, weight_decay)], losses, examples, queries)
    expected = influence(curvature, losses, examples, queries, 0.2)
    torch.testing.assert_close(found / 1e-9, expected, **EXACT)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_segments_compose(problem, weight_decay):
    """Oracle: one segment of the length of two with the same curvature."""
    curvature, examples, queries = problem
    two = [Segment(curvature, length, 0.2, weight_decay) for length in (0.5, 1.25)]
    found = source(two, losses, examples, queries)
    expected = source([Segment(curvature, 1.75, 0.2, weight_decay)], losses, examples, queries)
    torch.testing.assert_close(found, expected, **EXACT)


def test_a_query_can_have_its_own_measure(problem):
    """Oracle: minus the measure has minus the score."""
    curvature, examples, queries = problem
    arguments = [Segment(curvature, 1.0, 0.2)], losses, examples, queries
    found = source(*arguments, measure=lambda model, batch: -losses(model, batch))
    torch.testing.assert_close(found, -source(*arguments), **EXACT)


def trained_on(x, y, weights, start, lr, steps, damping, decay):
    """Return a trainer after K-FAC's steps on the weighted mean of squared errors."""
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)
    settings = {"estimator": mpikfac.Estimator(fisher_type="type-2"), "budget": None}
    settings |= {"preconditioner": "eigen", "grafting": mpikfac.NoGrafting(), "damping": damping}
    kfac = mpikfac.KFAC(model, optimizer, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(x)
        kfac.record(outputs, "squared-error")
        (weights * (outputs - y)[:, 0].square()).mean().backward()
        kfac.step()
    return kfac


def test_a_linear_model_has_the_derivative_of_its_training():
    """Oracle: real trainings, with a larger and a smaller weight of an example.

    The loss is quadratic, and the curvature constant and exact. The training begins where a step
    changes nothing, so that the gradients of examples are constant too. Only the difference of
    `(1 - lr q)^steps` and `exp(-lr steps q)` remains.
    """
    torch.manual_seed(1)
    examples, lr, steps, damping, decay = 12, 1e-3, 700, 0.3, 0.4
    x, y = torch.randn(examples, 3, dtype=F64), torch.randn(examples, 1, dtype=F64)
    hessian, slope = 2 * x.T @ x / examples, 2 * x.T @ y / examples
    direction = torch.linalg.inv(hessian + damping * torch.eye(3, dtype=F64))
    unmoved = direction @ hessian + decay * torch.eye(3, dtype=F64)
    start = torch.linalg.solve(unmoved, direction @ slope).T

    def errors(model, data):
        return (model(data[0]) - data[1]).square().sum(1)

    def trained_with(weights):
        return trained_on(x, y, weights, start, lr, steps, damping, decay)

    kfac = trained_with(torch.ones(examples, dtype=F64))
    torch.testing.assert_close(kfac.model.weight.detach(), start, **EXACT)
    kfac.model.eval()
    segment = Segment(Curvature.of(kfac), lr * steps, damping, decay)
    found = source([segment], errors, [(x, y)], (x[:2], y[:2]))[:, 4]
    weights = torch.ones(2, examples, dtype=F64)
    weights[:, 4] += torch.tensor([1e-3, -1e-3])
    more, less = (errors(trained_with(w).model, (x[:2], y[:2])).detach() for w in weights)
    torch.testing.assert_close(found, (less - more) / 2e-3, rtol=2e-3, atol=1e-6)


def test_refusals(problem):
    """Oracle: one line each."""
    curvature, examples, queries = problem
    with pytest.raises(ValueError, match="length=0.0 must be"):
        Segment(curvature, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"segments=\[\] must contain at least one"):
        source([], losses, examples, queries)
