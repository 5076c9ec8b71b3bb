"""SOURCE in K-FAC's own form: its limits, and the derivative of an unrolled training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.lab import Curvature, Segment, influence, source
from support.curved import F64, losses, network, trained

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
    """Oracle: influence with the weight decay as damping, whatever the run's damping."""
    curvature, examples, queries = problem
    segment = Segment(curvature, 1e6, mpikfac.Damping(relative=0.3), weight_decay=0.05)
    found = source([segment], losses, examples, queries)
    expected = influence(curvature, losses, examples, queries, 0.05)
    torch.testing.assert_close(found, expected, **EXACT)


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


def test_a_quadratic_problem_has_the_derivative_of_its_training():
    """Oracle: the deviation of the weights after many steps of K-FAC on a linear model.

    The loss is quadratic, so the curvature is constant and exact. A step changes the deviation d by
    `-lr P (H d - g / N)`; the sum of a geometric series has the deviation after all steps. Steps
    are small, so `(1 - lr p)^K` is nearly `exp(-lr K p)`, with which the result is exact.
    """
    torch.manual_seed(1)
    examples, lr, steps, damping, decay = 12, 1e-5, 100_000, 0.3, 0.05
    model = nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(examples, 3, dtype=F64), torch.randn(examples, 1, dtype=F64)
    estimator = mpikfac.Estimator(fisher_type="type-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = mpikfac.KFAC(model, optimizer, estimator=estimator, budget=None)
    outputs = model(x)
    kfac.record(outputs, "squared-error")
    nn.functional.mse_loss(outputs, y).backward()
    kfac.step()
    hessian = 2 * x.T @ x / examples + decay * torch.eye(3, dtype=F64)
    direction = torch.linalg.inv(2 * x.T @ x / examples + damping * torch.eye(3, dtype=F64))

    slopes = direction @ hessian
    discrete = torch.linalg.matrix_power(torch.eye(3, dtype=F64) - lr * slopes, steps)
    continuous = torch.linalg.matrix_exp(-lr * steps * slopes)
    responses = (
        torch.linalg.solve(slopes, (torch.eye(3, dtype=F64) - powers) @ direction)
        for powers in (discrete, continuous)
    )
    final = copy.deepcopy(model).eval()
    segment = Segment(Curvature.of(kfac), lr * steps, damping, decay)
    kfac.model.eval()

    def errors(network, data):
        return (network(data[0]) - data[1]).square().sum(1)

    found = source([segment], errors, [(x, y)], (x[:2], y[:2]))
    residuals = 2 * (final(x) - y) * x
    for response, tolerance in zip(responses, (1e-4, 1e-8)):
        expected = (residuals[:2] @ response @ residuals.T / examples).detach()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_refusals(problem):
    """Oracle: one line each."""
    curvature, examples, queries = problem
    with pytest.raises(ValueError, match="length=0.0 must be"):
        Segment(curvature, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"segments=\[\] must have at least one"):
        source([], losses, examples, queries)
