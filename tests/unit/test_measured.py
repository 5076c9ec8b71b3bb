"""The curvature of a pass over data: gradients of single examples, and factors of a trainer."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac import layers
from mpikfac.lab import Curvature, output_variances, self_influence
from mpikfac.lab.curvature.matrices import ParameterMatrices
from support import inside
from support.curved import CASES, F64, KINDS, Heads, coverage_of, network, vectors

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EXAMPLES = 5
COVERAGE = mpikfac.Coverage(covers={**layers.KINDS, **layers.NORMS})


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def outputs(model, x):
    return model(x)


def model_of(kind):
    """Return a model with a layer of a kind in `eval()` mode, and examples."""
    make, shape = KINDS[kind]
    model = nn.Sequential(make(), nn.Flatten()).double()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1)
    x = torch.randn(EXAMPLES, *shape, dtype=F64)
    if isinstance(model[0], nn.Embedding):
        x = torch.randint(5, (EXAMPLES, *shape))
    return model.eval(), x


def jacobians(model, x):
    """Return gradients of each output of each example, `[examples, outputs, *shape]` by name."""
    names, parameters = zip(*model.named_parameters())
    rows = [
        [torch.autograd.grad(output, parameters, retain_graph=True) for output in model(one)[0]]
        for one in x.split(1)
    ]
    return {
        name: torch.stack([torch.stack([of_output[i] for of_output in row]) for row in rows])
        for i, name in enumerate(names)
    }


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_squares_are_those_of_gradients_for_all_labels(kind, approximation):
    """Oracle: autograd for each output of each example; labels weighted by their probability."""
    model, x = model_of(kind)
    coverage = coverage_of(approximation)
    curvature = Curvature.measured(model, outputs, x.split(3), coverage=coverage)
    p, found = model(x).detach().softmax(1), jacobians(model, x)
    gradients = {
        name: j - torch.einsum("nc,nc...->n...", p, j)[:, None] for name, j in found.items()
    }
    covered = list(curvature.layers.values())
    matrices = ParameterMatrices(model, covered, ()).matrices(
        {name: g.flatten(0, 1) for name, g in gradients.items()}
    )
    for layer in covered:
        squares = curvature.bases[layer.name].rotate(matrices[layer.name]).square()
        expected = (p.reshape(-1, 1, 1, 1) * squares).sum(0) / EXAMPLES
        torch.testing.assert_close(curvature.bases[layer.name].values, expected, **EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_slices_of_examples_change_nothing(kind, approximation, monkeypatch):
    """Oracle: all examples at once; with `ELEMENTS` of 1, each example is a slice of its own."""
    model, x = model_of(kind)

    def losses(model, x):
        return model(x).square().sum(1)

    def found():
        coverage = coverage_of(approximation)
        curvature = Curvature.measured(model, outputs, x.split(3), coverage=coverage)
        values = {name: basis.values for name, basis in curvature.bases.items()}
        variances = output_variances(curvature, outputs, x, EXAMPLES, [0.1, 2.0])
        return values, variances, self_influence(curvature, losses, [x])

    expected = found()
    inside.elements_at_a_time(monkeypatch, 1)
    torch.testing.assert_close(found(), expected, **EXACT)
    model, x = model_of("linear")
    curvature = Curvature.measured(model, outputs, [x])
    (layer,) = curvature.layers.values()
    assert inside.examples_of_parts(model, layer, losses, x) == [1] * EXAMPLES


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "batch norm"])
@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error", "logistic"])
def test_factors_are_those_of_a_trainer(kind, loss):
    """Oracle: K-FAC's factors of the same weights and examples in one batch, in training mode."""
    model, x = model_of(kind)
    arguments = {"coverage": COVERAGE, "eigenvalues": "products"}
    found = Curvature.measured(model, outputs, x.split(2), loss, **arguments)
    estimator = mpikfac.Estimator(fisher_type="type-2", subsample=1)
    kfac = mpikfac.KFAC(
        model.train(),
        torch.optim.SGD(model.parameters(), lr=0.0),
        **{"estimator": estimator, "coverage": COVERAGE, "budget": None},
    )
    y = model(x)
    kfac.record(y, loss)
    y.sum().backward()
    kfac.step()
    v, expected = vectors(model), Curvature.of(kfac)
    other = expected.apply(v, lambda values: values)
    for name, tensor in found.apply(v, lambda values: values).items():
        torch.testing.assert_close(tensor, other[name], **EXACT)


def test_a_batch_need_not_call_each_layer():
    """Oracle: by hand, zeros in the sums of a layer that one batch of two does not call."""
    model, x = Heads().double().eval(), torch.randn(4, 3, dtype=F64)

    def some(model, batch):
        hidden = model.inner(batch[0]).tanh()
        return (model.other if batch[1] else model.used)(hidden)

    both = Curvature.measured(model, some, [(x, False), (x, True)])
    one = Curvature.measured(
        model, some, [(x, True)], coverage=mpikfac.Coverage(skip=["used"]), skip=["used"]
    )
    torch.testing.assert_close(both.eigenvalues("other"), one.eigenvalues("other") / 2, **EXACT)


def test_one_linear_layer_has_its_exact_fisher_matrix():
    """Oracle: the Hessian of the mean squared error, by autograd; both kinds of eigenvalues."""
    model = nn.Linear(4, 3).double().eval()
    x, y = torch.randn(30, 4, dtype=F64), torch.randn(30, 3, dtype=F64)
    a = torch.cat([x, torch.ones(30, 1, dtype=F64)], 1)
    hessian = torch.autograd.functional.hessian(
        lambda w: nn.functional.mse_loss(a @ w.view(3, 5).T, y), torch.randn(15, dtype=F64)
    )
    for eigenvalues in ("squares", "products"):
        curvature = Curvature.measured(
            model, outputs, [x], "squared-error", eigenvalues=eigenvalues
        )
        values = curvature.eigenvalues("")
        torch.testing.assert_close(values, torch.linalg.eigvalsh(hessian), **EXACT)


def test_the_dense_matrix_has_the_smaller_determinant():
    """Oracle: Hadamard, for the exact Fisher matrix of the whole network, and its trace.

    A curvature of the sum of examples, or of a mean over classes, breaks the bound or the trace.
    """
    model, x = network().eval(), torch.randn(20, 2, 3, 3, dtype=F64)
    curvature = Curvature.measured(model, outputs, x.split(8))
    p, found = model(x).detach().softmax(1), jacobians(model, x)
    flats = torch.cat([j.flatten(2) for j in found.values()], 2)
    flats = flats - torch.einsum("nc,nci->ni", p, flats)[:, None]
    fisher = torch.einsum("nc,nci,ncj->ij", p, flats, flats) / len(x)
    dense = (20 * fisher + 0.1 * torch.eye(len(fisher), dtype=F64)).logdet().item()
    assert curvature.logdet(20, 0.1) >= dense
    assert curvature.trace() == pytest.approx(fisher.trace().item(), rel=1e-10)


def cuts(blocks):
    """Return the parts of a matrix that have blocks along the diagonal."""
    ends = itertools.accumulate((block.shape[-1] for block in blocks), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@pytest.mark.parametrize("rule", [{"largest": 2}, {"diagonal": "AG"}])
def test_blocks_and_diagonals_are_cut_from_the_whole(rule):
    """Oracle: blocks of the factors of a layer with whole ones, as moments of its vectors."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3)).double().eval()
    x = torch.randn(20, 2, 3, 3, dtype=F64)
    coverage = mpikfac.Coverage(rule=lambda layer: dataclasses.replace(layer, **rule))
    found = Curvature.measured(model, outputs, [x], coverage=coverage, eigenvalues="products")
    a = torch.cat([x.flatten(1), torch.ones(20, 1, dtype=F64)], 1)
    p = model(x).detach().softmax(1)
    g = torch.diag(p.mean(0)) - p.T @ p / 20
    a = a.T @ a / 20
    basis = found.bases["1"]
    if "diagonal" in rule:
        assert not basis.a and not basis.g
        values = torch.outer(g.diagonal(), a.diagonal())
    else:
        of_a, of_g = (
            torch.cat([torch.linalg.eigvalsh(side[part, part]) for part in parts])
            for side, parts in ((a, cuts(basis.a)), (g, cuts(basis.g)))
        )
        values = torch.outer(of_g, of_a)
    torch.testing.assert_close(basis.values[0], values, **EXACT)


def test_sampled_labels_have_the_expectation_of_all():
    """Oracle: the trace for all labels; 400 passes over 20 examples, 5 %."""
    model, x = network().eval(), torch.randn(20, 2, 3, 3, dtype=F64)
    exact = Curvature.measured(model, outputs, [x]).trace()
    sampled = Curvature.measured(model, outputs, [x] * 400, fisher_type="mc").trace()
    assert sampled == pytest.approx(exact, rel=0.05)


def test_refusals():
    """Oracle: one line each."""
    model, x = network(), torch.randn(4, 2, 3, 3, dtype=F64)
    with pytest.raises(mpikfac.UserError, match=r"is in training mode; call model\.eval\(\) first"):
        Curvature.measured(model, outputs, [x])
    model.eval()
    with pytest.raises(mpikfac.UserError, match="the batches do not call layer '0'"):
        Curvature.measured(model, outputs, [])
    with pytest.raises(mpikfac.UserError, match=r"one row per example, .* not \[4\]"):
        Curvature.measured(model, lambda m, x: m(x).sum(1), [x])
    with pytest.raises(ValueError, match="fisher_type='exact' must be"):
        Curvature.measured(model, outputs, [x], fisher_type="exact")
    with pytest.raises(ValueError, match="eigenvalues='moments' must be"):
        Curvature.measured(model, outputs, [x], eigenvalues="moments")
