"""Laplace approximations against closed forms, dense matrices and laplace-torch."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac.lab import (
    Curvature,
    evidence_prior,
    log_evidence,
    output_variances,
    probit,
    sampled_models,
)
from support.curved import CASES, F64, KINDS, coverage_of, network, trained

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-10, "atol": 1e-10}
EXAMPLES, NOISE = 30, 1 / 2  # the mean squared error is -log N(y | output, 1/2), up to a constant


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def outputs(model, x):
    return model(x)


@pytest.fixture
def regression():
    """Return a linear model, its curvature, and its inputs with a 1, and labels."""
    model = nn.Linear(4, 1).double().eval()
    x = torch.randn(EXAMPLES, 4, dtype=F64)
    labels = x @ torch.randn(4, 1, dtype=F64) + torch.randn(EXAMPLES, 1, dtype=F64)
    curvature = Curvature.measured(model, outputs, [x], "squared-error")
    return model, curvature, torch.cat([x, torch.ones(EXAMPLES, 1, dtype=F64)], 1), labels[:, 0]


def fit(model, a, y, prior):
    """Move the model to the mode of its posterior, and return the log-likelihood."""
    precision = a.T @ a / NOISE + prior * torch.eye(5, dtype=F64)
    mode = torch.linalg.solve(precision, a.T @ y / NOISE)
    with torch.no_grad():
        model.weight.copy_(mode[None, :4])
        model.bias.copy_(mode[4:])
    errors = y - a @ mode
    return (-errors @ errors / (2 * NOISE) - EXAMPLES / 2 * math.log(2 * math.pi * NOISE)).item()


def marginal(a, y, prior):
    """Return the log-density of the labels, a multivariate normal."""
    covariance = a @ a.T / prior + NOISE * torch.eye(EXAMPLES, dtype=F64)
    mean = torch.zeros(EXAMPLES, dtype=F64)
    return torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)


def test_the_evidence_of_a_linear_gaussian_model(regression):
    """Oracle: the log-density of the labels under their marginal."""
    model, curvature, a, y = regression
    for prior in (0.1, 0.5, 20.0):
        found = log_evidence(curvature, fit(model, a, y, prior), EXAMPLES, prior)
        assert found == pytest.approx(marginal(a, y, prior).item(), rel=1e-10)


def test_the_prior_of_the_largest_evidence(regression):
    """Oracle: derivative of the marginal by autograd is 0 after refits, as of MacKay's evidence."""
    model, curvature, a, y = regression
    prior = 1.0
    for _ in range(200):  # the mode depends on the prior
        fit(model, a, y, prior)
        prior = evidence_prior(curvature, EXAMPLES)
    tau = torch.tensor(prior, dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(marginal(a, y, tau), tau)
    assert abs(slope.item() * prior) < 1e-8
    fit(model, a, y, 0.3)
    prior = evidence_prior(curvature, EXAMPLES)  # a root of the fixed point at any weights
    squares = sum(p.square().sum().item() for p in model.parameters())
    gamma = sum(curvature.effective(EXAMPLES, prior).values())
    assert prior * squares == pytest.approx(gamma, rel=1e-8)


def test_variances_of_a_linear_model_are_those_of_its_posterior(regression):
    """Oracle: `a^T (A^T A / noise + prior I)^-1 a`, by a dense inverse, for several priors."""
    _, curvature, a, _ = regression
    priors = [0.1, 3.0]
    found = output_variances(curvature, outputs, a[:, :4], EXAMPLES, priors)
    for variances, prior in zip(found, priors, strict=True):
        inverse = torch.linalg.inv(a.T @ a / NOISE + prior * torch.eye(5, dtype=F64))
        expected = torch.einsum("ni,ij,nj->n", a, inverse, a)
        torch.testing.assert_close(variances[:, 0], expected, **EXACT)


@pytest.mark.parametrize(("kind", "approximation"), CASES)
def test_variances_are_quadratic_forms_of_gradients(kind, approximation):
    """Oracle: `Curvature.apply` to the gradient of each output of each example, by autograd."""
    make, shape = KINDS[kind]
    model = nn.Sequential(make(), nn.Flatten()).double().eval()
    coverage = coverage_of(approximation)
    x = torch.randn(3, *shape, dtype=F64)
    if isinstance(model[0], nn.Embedding):
        x = torch.randint(5, (3, *shape))
    curvature = Curvature.measured(model, outputs, [x], coverage=coverage)
    found = output_variances(curvature, outputs, x, 50, [0.3])[0]
    names, parameters = zip(*model.named_parameters())
    for row, one in zip(found, x.split(1), strict=True):
        for variance, output in zip(row, model(one)[0], strict=True):
            g = dict(zip(names, torch.autograd.grad(output, parameters, retain_graph=True)))
            solved = curvature.apply(g, lambda values: 1 / (50 * values + 0.3))
            expected = sum((g[name] * solved[name]).sum() for name in names)
            torch.testing.assert_close(variance, expected, **EXACT)


def test_the_last_layer_has_a_closed_form():
    """Oracle: `(phi^T V_A phi) (U)_cc` for Kronecker factors without damping of the products.

    With the features phi of an example, the covariance of the outputs is a sum over eigenvectors.
    """
    model, x = network().eval(), torch.randn(9, 2, 3, 3, dtype=F64)
    skip = ["0", "3"]
    arguments = {"coverage": mpikfac.Coverage(skip=skip), "skip": skip}
    curvature = Curvature.measured(model, outputs, [x], eigenvalues="products", **arguments)
    phi = torch.cat([model[:-1](x), torch.ones(9, 1, dtype=F64)], 1).detach()
    p = model(x).detach().softmax(1)
    g, a = torch.diag(p.mean(0)) - p.T @ p / 9, phi.T @ phi / 9
    dense = torch.linalg.inv(9 * torch.kron(g, a) + 0.5 * torch.eye(12, dtype=F64))
    expected = torch.einsum("ni,cicj,nj->nc", phi, dense.view(3, 4, 3, 4), phi)
    found = output_variances(curvature, outputs, x, 9, [0.5])[0]
    torch.testing.assert_close(found, expected, **EXACT)


def test_probabilities_of_gaussian_logits():
    """Oracle: the mean of the softmax over a million samples, to a hundredth; no variance."""
    mean, variances = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.5, 2.0])
    drawn = (mean + variances.sqrt() * torch.randn(1_000_000, 3)).softmax(1).mean(0)
    torch.testing.assert_close(probit(mean, variances), drawn, rtol=0, atol=0.02)
    torch.testing.assert_close(probit(mean, torch.zeros(3)), mean.softmax(0))


def test_sampled_models_have_the_posterior_of_their_outputs(regression):
    """Oracle: the variance of a linear model's outputs, 5 % for 4,000 samples; then the mode."""
    model, curvature, a, y = regression
    fit(model, a, y, 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, generator = a[:, :4], torch.Generator().manual_seed(0)
    samples = sampled_models(curvature, EXAMPLES, 0.5, generator, 4000)
    drawn = torch.stack([sampled(x).detach()[:, 0] for sampled in samples])
    expected = output_variances(curvature, outputs, x, EXAMPLES, [0.5])[0, :, 0]
    assert (drawn.var(0) - expected).norm() < 0.05 * expected.norm()
    torch.testing.assert_close(drawn.mean(0), model(x).detach()[:, 0], rtol=0, atol=0.05)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_batch_norm_has_the_statistics_of_the_sample():
    """Oracle: mean and variance of the sampled layer's outputs over the inputs, by torch.

    Afterwards, also after an interruption, weights and statistics are those of the mode.
    """
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).double().eval()
    x = torch.randn(40, 3, dtype=F64)
    curvature = Curvature.measured(model, outputs, [x], skip=["1"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = sampled_models(curvature, 40, 1.0, torch.Generator(), 3, [x])
    sampled = next(samples)
    hidden = sampled[0](x).detach()
    assert not torch.equal(sampled[0].weight, before["0.weight"]) and not sampled.training
    torch.testing.assert_close(sampled[1].running_mean, hidden.mean(0), **EXACT)
    torch.testing.assert_close(sampled[1].running_var, hidden.var(0), **EXACT)
    samples.close()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_refusals(regression):
    """Oracle: one line each."""
    model, curvature, a, _ = regression
    with pytest.raises(ValueError, match="prior=0.0 must be a number above 0"):
        output_variances(curvature, outputs, a[:, :4], EXAMPLES, [0.0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(
        mpikfac.UserError, match="the evidence has no maximum: the squared norm of the weights"
    ):
        evidence_prior(curvature, EXAMPLES)
    model.train()
    with pytest.raises(ValueError, match=r"is in training mode; call model\.eval\(\) first"):
        output_variances(curvature, outputs, a[:, :4], EXAMPLES, [1.0])


@pytest.mark.skipif(
    not importlib.util.find_spec("laplace"),
    reason="laplace-torch is not installed: pip install laplace-torch curvlinops-for-pytorch",
)
def test_evidence_and_variances_are_those_of_laplace_torch():
    """Oracle: laplace-torch with Kronecker factors, without biases: 1e-4 in float32."""
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    model = nn.Sequential(*layers).eval()
    x, y = torch.randn(60, 6), torch.randint(3, (60,))
    curvature = Curvature.measured(model, outputs, [x], eigenvalues="products")
    other = Laplace(model, "classification", "all", "kron", prior_precision=0.7)
    other.fit(DataLoader(TensorDataset(x, y), 60))
    likelihood = -F.cross_entropy(model(x), y, reduction="sum").item()
    found = log_evidence(curvature, likelihood, 60, 0.7)
    assert found == pytest.approx(other.log_marginal_likelihood().item(), rel=1e-4)
    variances = output_variances(curvature, outputs, x, 60, [0.7])[0].float()
    _, covariances = other._glm_predictive_distribution(x)
    expected = covariances.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(variances, expected, rtol=1e-3, atol=1e-5)
    predicted = probit(model(x).detach(), variances)
    torch.testing.assert_close(
        predicted, other(x, pred_type="glm", link_approx="probit"), rtol=1e-3, atol=1e-4
    )


def test_layers_of_other_ranks_are_refused():
    """Oracle: one line, for a curvature whose owners have other layers."""
    kfac = trained(network())
    curvature = Curvature.of(kfac)
    del curvature.bases["3"]
    with pytest.raises(ValueError, match=r"another rank owns layer '3'; pass curvature\.repl"):
        output_variances(curvature, outputs, torch.randn(1, 2, 3, 3, dtype=F64), 1, [1.0])
