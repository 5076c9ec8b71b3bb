"""Layer records and influence functions, compared with gradients of single examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import layers
from mpikfac.lab import (
    Curvature,
    influence,
    influence_memory,
    output_variances,
    self_influence,
)
from mpikfac.lab.curvature.matrices import ParameterMatrices
from mpikfac.lab.curvature.records import gradients, products, record
from support import inside
from support.curved import CASES, F64, KINDS, Heads, coverage_of, losses, network, trained

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EXAMPLES = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def squared(model, x):
    """Return one loss per example."""
    outputs = model(x).flatten(1)
    return (outputs * torch.linspace(-1, 2, outputs.shape[1], dtype=F64)).sum(1).square()


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_records_are_the_gradients_of_examples(kind, approximation):
    """Oracle: autograd, example by example, and products of its gradients with random vectors."""
    make, shape = KINDS[kind]
    model = nn.Sequential(make()).double()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1)
    model.eval()
    covered, _ = layers.cover(model, coverage_of(approximation))
    x = torch.randn(EXAMPLES, *shape, dtype=F64)
    if isinstance(model[0], nn.Embedding):
        x = torch.randint(5, (EXAMPLES, *shape))

    named, trained_ones = zip(*model.named_parameters())
    alone = [
        torch.autograd.grad(squared(model, x[i : i + 1]), trained_ones) for i in range(EXAMPLES)
    ]
    expected = dict(zip(named, map(torch.cat, zip(*([g[None] for g in each] for each in alone)))))
    records = record(model, covered, squared, x)
    found = {layer.name: gradients(layer, records[layer.name], EXAMPLES) for layer in covered}
    tensors = ParameterMatrices(model, covered, ()).tensors(found)
    assert {*tensors} == {*expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, **EXACT)
    for layer in covered:
        v = torch.randn(2, *found[layer.name].shape[1:], dtype=F64)
        scores = torch.einsum("vkoi,bkoi->vb", v, found[layer.name])
        torch.testing.assert_close(products(v, records[layer.name], EXAMPLES), scores, **EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_self_influence_is_a_quadratic_form(kind, approximation):
    """Oracle: `Curvature.quadratic` of autograd's gradients, example by example."""
    make, shape = KINDS[kind]
    model = nn.Sequential(make(), nn.Flatten()).double().eval()
    x = torch.randn(EXAMPLES, *shape, dtype=F64)
    if isinstance(model[0], nn.Embedding):
        x = torch.randint(5, (EXAMPLES, *shape))
    coverage = coverage_of(approximation)
    curvature = Curvature.measured(model, lambda model, x: model(x), [x], coverage=coverage)
    found, (names, parameters) = [], zip(*model.named_parameters())
    for one in x.split(1):
        g = torch.autograd.grad(squared(model, one).sum(), parameters)
        found.append(curvature.quadratic(dict(zip(names, g)), 0.3))
    torch.testing.assert_close(
        self_influence(curvature, squared, [x], 0.3), torch.stack(found), **EXACT
    )


def test_a_layer_that_is_not_called_has_no_influence():
    """Oracle: the same model without the layer; variances of its outputs, too."""
    model, x = Heads().double(), torch.randn(EXAMPLES, 3, dtype=F64)
    model.train()
    estimator = mpikfac.Estimator(fisher_type="type-2")
    kfac = mpikfac.KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.0), estimator=estimator, budget=None
    )
    y = model(x)
    kfac.record(y, "cross-entropy")
    y.sum().backward()
    kfac.step()
    curvature = Curvature.of(kfac)
    model.eval()
    found = self_influence(curvature, squared, [x], 0.3)
    variances = output_variances(curvature, lambda model, x: model(x), x, 50, [0.3])
    planned = influence_memory(curvature, squared, x[:1], EXAMPLES, 1)
    assert all(planned.values())
    names, expected = [n for n, _ in model.named_parameters() if "other" not in n], []
    parameters = [model.get_parameter(name) for name in names]
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for one in x.split(1):
        g = torch.autograd.grad(squared(model, one).sum(), parameters)
        expected.append(curvature.quadratic(zeros | dict(zip(names, g)), 0.3))
    torch.testing.assert_close(found, torch.stack(expected), **EXACT)
    assert variances.shape == (1, EXAMPLES, 3) and (variances > 0).all()


def test_records_of_a_float32_batch_norm_are_the_gradients_of_examples():
    """Oracle: autograd, example by example, in float32."""
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    with torch.no_grad():
        for tensor in (model[0].running_mean, model[0].running_var, *model.parameters()):
            tensor.uniform_(0.2, 1)
    covered, _ = layers.cover(model, mpikfac.Coverage(covers=layers.NORMS))
    x = torch.randn(EXAMPLES, 3, 2, 4)

    def loss(model, x):
        return model(x).flatten(1).square().mean(1)

    alone = [torch.autograd.grad(loss(model, x[i : i + 1]), model[0].weight) for i in range(4)]
    found = gradients(covered[0], record(model, covered, loss, x)["0"], EXAMPLES)
    torch.testing.assert_close(found[:, :, 0, 0].float(), torch.cat([g[None] for (g,) in alone]))


def batch(count):
    return torch.randn(count, 2, 3, 3, dtype=F64), torch.randint(3, (count,))


def gradients_of(model, data):
    """Return the gradients of the examples' losses, by autograd, one by one."""
    found = []
    for x, y in zip(*data):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def inner(first, second):
    return sum((first[name] * second[name]).sum() for name in first)


def test_influence_is_the_product_with_the_solution():
    """Oracle: `g_q^T solve(g_t) / N` of gradients one by one, whatever the batches."""
    kfac = trained(network())
    curvature, model = Curvature.of(kfac), kfac.model.eval()
    examples, queries = batch(7), batch(3)
    parts = list(zip(*(tensor.split([4, 3]) for tensor in examples)))
    found = influence(curvature, losses, parts, queries, 0.05)
    assert found.shape == (3, 7)
    of_queries, of_examples = gradients_of(model, queries), gradients_of(model, examples)
    for scores, g in zip(found, of_queries):
        solved = curvature.solve(g, 0.05)
        expected = torch.stack([inner(solved, t) for t in of_examples]) / 7
        torch.testing.assert_close(scores, expected, **EXACT)
    own = self_influence(curvature, losses, parts, 0.05)
    expected = torch.stack([curvature.quadratic(g, 0.05) for g in of_examples])
    torch.testing.assert_close(own, expected, **EXACT)


def test_a_query_can_have_its_own_measure():
    """Oracle: minus the measure has minus the influence."""
    kfac = trained(network())
    curvature, data = Curvature.of(kfac), batch(4)
    kfac.model.eval()
    arguments = curvature, losses, [data], data
    found = influence(*arguments, measure=lambda model, d: -losses(model, d))
    torch.testing.assert_close(found, -influence(*arguments), **EXACT)
    assert (influence(*arguments).diagonal() > 0).all()  # an example helps itself


def test_influence_predicts_leaving_an_example_out():
    """Oracle: ridge regression fitted again without each example.

    The step to the new optimum is exact after the division by 1 - leverage, so the change of the
    query's loss is the influence, and a term of second order.
    """
    examples, ridge = 40, 0.05
    model = nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(examples, 3, dtype=F64), torch.randn(examples, 1, dtype=F64)
    query = torch.randn(1, 3, dtype=F64), torch.randn(1, 1, dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    estimator = mpikfac.Estimator(fisher_type="type-2")
    kfac = mpikfac.KFAC(model, optimizer, estimator=estimator, budget=None)
    outputs = model(x)
    kfac.record(outputs, "squared-error")
    F.mse_loss(outputs, y).backward()
    kfac.step()
    hessian = 2 * x.T @ x / examples + ridge * torch.eye(3, dtype=F64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(hessian, 2 * x.T @ y / examples).T)
    curvature = Curvature.of(kfac)
    model.eval()

    def errors(model, data):
        return (model(data[0]) - data[1]).square().sum(1)

    scores = influence(curvature, errors, [(x, y)], query, ridge)[0]
    leverage = 2 * curvature.quadratic({"weight": x[:, None]}, ridge) / examples
    slope = 2 * (model(query[0]) - query[1]) * query[0]
    for left in range(examples):
        kept = torch.arange(examples) != left
        a, b = x[kept], y[kept]
        reduced = 2 * a.T @ a / examples + ridge * torch.eye(3, dtype=F64)
        moved = torch.linalg.solve(reduced, 2 * a.T @ b / examples).T - model.weight
        change = (slope * moved).sum()
        torch.testing.assert_close(scores[left] / (1 - leverage[left]), change, **EXACT)


def test_a_unit_without_gradients_changes_no_score():
    """Oracle: zero in place of the inverse where all eigenvalues are 0, by autograd one by one."""
    modules = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    model = nn.Sequential(*modules).double()
    with torch.no_grad():
        model[1].weight[1], model[1].bias[1] = 0, -1  # the ReLU's inputs are always negative
    coverage = mpikfac.Coverage(covers={**layers.KINDS, **layers.NORMS})
    curvature, data = Curvature.of(trained(model, coverage=coverage)), batch(4)
    model.eval()

    def inverse(values):
        mean = values.mean((-2, -1), keepdim=True)
        return torch.where(mean > 0, 1 / (values + 0.1 * mean), 0)

    found = influence(curvature, losses, [data], data)
    of_examples = gradients_of(model, data)
    for scores, g in zip(found, of_examples):
        solved = curvature.apply(g, inverse)
        expected = torch.stack([inner(solved, t) for t in of_examples]) / 4
        torch.testing.assert_close(scores, expected, **EXACT)


def test_more_queries_than_memory_are_refused(monkeypatch):
    """Oracle: 5 times 8 bytes for each of 80 parameters, by hand; memory for one query of two."""
    kfac = trained(network())
    curvature, data = Curvature.of(kfac), batch(2)
    kfac.model.eval()
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 6_399, "SC_PHYS_PAGES": 1}.get)
    message = r"2 queries with 80 parameters need 6,400 bytes of memory .* pass at most 1 at a time"
    with pytest.raises(mpikfac.UserError, match=message):
        influence(curvature, losses, [], data)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 6_400, "SC_PHYS_PAGES": 1}.get)
    assert influence(curvature, losses, [data], data).shape == (2, 2)


def test_refusals():
    """Oracle: one line each."""
    kfac = trained(network())
    curvature, data = Curvature.of(kfac), batch(2)
    with pytest.raises(ValueError, match=r"is in training mode; call model\.eval\(\) first"):
        influence(curvature, losses, [data], data)
    kfac.model.eval()
    with pytest.raises(ValueError, match=r"one loss per example, \[examples\], not \[\]"):
        influence(curvature, lambda m, d: F.cross_entropy(m(d[0]), d[1]), [data], data)
    with pytest.raises(ValueError, match="has 2 examples, but the batch has 6"):
        record(kfac.model, inside.layers(kfac), lambda m, d: losses(m, d).repeat(3), data)
