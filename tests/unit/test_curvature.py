"""The curvature of a run, from its factors: every function compared with dense matrices."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.lab import Curvature
from mpikfac.numerics import unfold_triangle
from support.curved import F64, network, trained, vectors

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def dense(kfac):
    """Return `kron(G, A)` of every layer, `[n, n]`, or block by block of a layer with groups."""
    state = kfac.state_dict()
    factors = {n: unfold_triangle(v) for n, v in state.items() if n.startswith("kfac/factors/")}
    sides = [[factors[f"kfac/factors/{n}.{s}"] for s in "GA"] for n in ("0", "3", "5")]
    blocks = [
        [torch.kron(*pair) for pair in zip(*sides[0])],
        *([torch.kron(*s)] for s in sides[1:]),
    ]
    return [torch.block_diag(*of_layer) for of_layer in blocks]


def flat(v):
    """Return the matrices of the layers of `network` as vectors."""
    joined = torch.cat([v["0.weight"].flatten(1), v["0.bias"][:, None]], 1)
    last = torch.cat([v["5.weight"], v["5.bias"][:, None]], 1)
    return [joined.flatten(), v["3.weight"].flatten(), last.flatten()]


@pytest.fixture
def kfac():
    return trained(network())


def damped(kfac, damping):
    return [c + damping * torch.eye(len(c), dtype=F64) for c in dense(kfac)]


def test_solving_is_the_dense_solve(kfac):
    """Oracle: `torch.linalg.solve` with the Kronecker products written out."""
    v = vectors(kfac.model)
    found = flat(Curvature.of(kfac).solve(v, 0.03))
    for x, c, b in zip(found, damped(kfac, 0.03), flat(v)):
        torch.testing.assert_close(x, torch.linalg.solve(c, b), **EXACT)


def test_a_relative_damping_is_a_multiple_of_the_mean_eigenvalue(kfac):
    """Oracle: the trace of the Kronecker product, over its order; for each group of a layer."""
    v = vectors(kfac.model)
    found = flat(Curvature.of(kfac).solve(v, mpikfac.Damping(relative=0.1)))
    for x, c, b in list(zip(found, dense(kfac), flat(v)))[1:]:
        added = 0.1 * c.trace() / len(c) * torch.eye(len(c), dtype=F64)
        torch.testing.assert_close(x, torch.linalg.solve(c + added, b), **EXACT)


def test_examples_are_solved_one_by_one(kfac):
    """Oracle: the same function of each example's vector."""
    v, curvature = vectors(kfac.model, 3), Curvature.of(kfac)
    found = curvature.solve(v)
    for number in range(3):
        alone = curvature.solve({name: tensor[number] for name, tensor in v.items()})
        for name in v:
            torch.testing.assert_close(found[name][number], alone[name], **EXACT)
    none = curvature.solve(vectors(kfac.model, 0))
    assert [t.shape for t in none.values()] == [(0, *p.shape) for p in kfac.model.parameters()]


def test_powers_compose(kfac):
    """Oracle: two inverse roots are an inverse."""
    v, curvature = vectors(kfac.model), Curvature.of(kfac)
    twice = curvature.power(curvature.power(v, -0.5, 0.1), -0.5, 0.1)
    for name, expected in curvature.solve(v, 0.1).items():
        torch.testing.assert_close(twice[name], expected, **EXACT)


def test_the_quadratic_form_is_dense(kfac):
    """Oracle: `v^T (C + damping)^-1 v`, with and without a dimension of examples."""
    v, curvature = vectors(kfac.model), Curvature.of(kfac)
    pairs = zip(flat(v), damped(kfac, 0.2))
    expected = sum(b @ torch.linalg.solve(c, b) for b, c in pairs)
    torch.testing.assert_close(curvature.quadratic(v, 0.2), expected, **EXACT)
    several = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in v.items()}
    found = curvature.quadratic(several, 0.2)
    torch.testing.assert_close(found, expected * torch.tensor([1, 4]), **EXACT)


def test_values_of_the_whole_curvature_are_dense(kfac):
    """Oracle: `logdet`, `trace` and eigenvalues of the Kronecker products, by LAPACK."""
    curvature, scale, prior = Curvature.of(kfac), 40.0, 0.7
    blocks = dense(kfac)
    posterior = [scale * c + prior * torch.eye(len(c), dtype=F64) for c in blocks]
    logdet = sum(p.logdet().item() for p in posterior)
    assert curvature.logdet(scale, prior) == pytest.approx(logdet, rel=1e-12)
    assert curvature.trace() == pytest.approx(sum(c.trace().item() for c in blocks), rel=1e-12)
    for name, c, p in zip(("0", "3", "5"), blocks, posterior):
        found = curvature.eigenvalues(name)
        torch.testing.assert_close(found, torch.linalg.eigvalsh(c), rtol=1e-10, atol=1e-12)
        gamma = torch.linalg.solve(p, scale * c).trace().item()
        assert curvature.effective(scale, prior)[name] == pytest.approx(gamma, rel=1e-10)


def test_samples_depend_on_the_curvature_alone():
    """Oracle: the same curvature with eigenvectors of the opposite sign."""
    curvature = Curvature.of(trained(network()))
    drawn = []
    for _ in range(2):
        drawn.append(curvature.sample(40.0, 0.7, torch.Generator().manual_seed(1), 3))
        for basis in curvature.bases.values():
            for block in (*basis.a, *basis.g):
                block[..., 0].neg_()
    torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-12, atol=1e-12)


def test_samples_have_the_covariance_of_the_posterior(kfac):
    """Oracle: the inverse of the dense precision, 5 % in the Frobenius norm for 20,000 samples."""
    drawn = Curvature.of(kfac).sample(40.0, 0.7, torch.Generator().manual_seed(1), 20_000)
    rows = torch.cat([drawn["5.weight"], drawn["5.bias"][..., None]], -1).flatten(1)
    precision = 40.0 * dense(kfac)[2] + 0.7 * torch.eye(rows.shape[1], dtype=F64)
    expected = torch.linalg.inv(precision)
    assert (torch.cov(rows.T) - expected).norm() <= 0.05 * expected.norm()


# -- closed forms --------------------------------------------------------------------------------


def linear(loss, inputs=4, outputs=1, examples=30, **settings):
    """Return a trainer of a linear layer after one step on all examples, and its data."""
    model = nn.Linear(inputs, outputs).double()
    x, y = torch.randn(examples, inputs, dtype=F64), torch.randn(examples, outputs, dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    estimator = mpikfac.Estimator(fisher_type="type-2")
    kfac = mpikfac.KFAC(model, optimizer, estimator=estimator, budget=None, **settings)
    outputs = model(x)
    kfac.record(outputs, "squared-error")
    loss(outputs, y).backward()
    kfac.step()
    ones = torch.ones(examples, 1, dtype=F64)
    return kfac, torch.cat([x, ones], 1), y


def test_a_linear_layer_has_its_exact_hessian():
    """Oracle: the Hessian of the mean squared error, by autograd: one layer's blocks are exact."""
    kfac, a, y = linear(nn.functional.mse_loss, outputs=3)
    hessian = torch.autograd.functional.hessian(
        lambda w: nn.functional.mse_loss(a @ w.view(3, 5).T, y), torch.randn(15, dtype=F64)
    )
    curvature = Curvature.of(kfac)
    v = vectors(kfac.model)
    found = curvature.apply(v, lambda values: values)
    flat_v = torch.cat([v["weight"], v["bias"][:, None]], 1).flatten()
    product = torch.cat([found["weight"], found["bias"][:, None]], 1).flatten()
    torch.testing.assert_close(product, hessian @ flat_v, **EXACT)
    assert curvature.logdet(30, 0.1) == pytest.approx(
        (30 * hessian + 0.1 * torch.eye(15, dtype=F64)).logdet().item(), rel=1e-12
    )


def test_the_evidence_of_a_linear_gaussian_model():
    """Oracle: the log-density of the labels under their marginal, a multivariate normal.

    The curvature is of one example, and the posterior of all: a factor of 30 in the log-determinant
    would show.
    """
    kfac, a, y = linear(nn.functional.mse_loss)
    prior, examples = 0.5, len(a)
    curvature = Curvature.of(kfac)
    # The mean squared error is -log N(y | output, 1/2) of an example, up to a constant.
    precision = 2 * a.T @ a + prior * torch.eye(5, dtype=F64)
    mode = torch.linalg.solve(precision, 2 * a.T @ y)[:, 0]
    errors = y[:, 0] - a @ mode
    likelihood = -errors @ errors - examples / 2 * math.log(math.pi)
    log_prior = -prior / 2 * mode @ mode + 5 / 2 * math.log(prior)
    evidence = likelihood + log_prior - curvature.logdet(examples, prior) / 2
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(examples, dtype=F64), a @ a.T / prior + torch.eye(examples, dtype=F64) / 2
    )
    torch.testing.assert_close(evidence, marginal.log_prob(y[:, 0]), rtol=1e-10, atol=1e-10)


def test_leverages_give_ridge_regression_without_one_example():
    """Oracle: the prediction error of ridge regression fitted without each example."""
    kfac, a, y = linear(nn.functional.mse_loss)
    ridge, examples = 0.01, len(a)  # of the mean squared error
    curvature = Curvature.of(kfac)
    penalty = ridge / 2 * torch.eye(5, dtype=F64)
    w = torch.linalg.solve(a.T @ a / examples + penalty, a.T @ y / examples)
    rows = {"weight": a[:, None, :-1], "bias": a[:, None, -1]}
    leverage = 2 * curvature.quadratic(rows, ridge) / examples
    found = (y - a @ w)[:, 0] / (1 - leverage)
    for left in range(examples):
        kept = torch.arange(examples) != left
        b, c = a[kept], y[kept]
        without = torch.linalg.solve(b.T @ b / examples + penalty, b.T @ c / examples)
        torch.testing.assert_close(found[left], (y - a @ without)[left, 0], rtol=1e-10, atol=1e-10)


def test_a_kronecker_product_bounds_nothing_but_its_own_diagonal():
    """Oracle: Hadamard: of all diagonals in a basis, second moments have a larger determinant.

    The diagonal of the exact Fisher matrix in the eigenbasis has at least its log-determinant. A
    curvature of the sum of examples, or of a mean over outputs, breaks the bound.
    """
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(20, 4, dtype=F64), torch.randint(3, (20,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    estimator = mpikfac.Estimator(fisher_type="empirical")
    kfac = mpikfac.KFAC(model, optimizer, estimator=estimator, budget=None)
    nn.functional.cross_entropy(model(x), y).backward()
    kfac.step()
    curvature = Curvature.of(kfac)
    g = model(x).softmax(1) - nn.functional.one_hot(y, 3)
    gradients = g[:, :, None] * torch.cat([x, torch.ones(20, 1, dtype=F64)], 1)[:, None, :]
    flats = gradients.detach().flatten(1)
    fisher = flats.T @ flats / 20
    rotated = curvature.bases[""].rotate(gradients.detach()[:, None])
    squares = rotated.square().mean(0).flatten()
    dense_logdet = (20 * fisher + 0.1 * torch.eye(15, dtype=F64)).logdet()
    assert (20 * squares + 0.1).log().sum() >= dense_logdet
    # Both estimates have the trace of the Fisher matrix only if they are of one example.
    assert squares.sum() == pytest.approx(fisher.trace().item(), rel=1e-12)
    assert 0.5 < curvature.trace() / fisher.trace().item() < 2


# -- checkpoints and refusals --------------------------------------------------------------------


def test_a_checkpoint_is_the_curvature_at_its_weights(kfac, tmp_path):
    """Oracle: the trainer, before it is saved; bits of the weights and of a solution."""
    mpikfac.save_checkpoint(mpikfac.world(), tmp_path / "checkpoints", kfac.state_dict(), 3)
    model = network()
    loaded, v = Curvature.load(tmp_path, model), vectors(model)
    for name, tensor in kfac.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    live = Curvature.of(kfac)
    for name, tensor in live.solve(v).items():
        assert torch.equal(tensor, loaded.solve(v)[name])


@pytest.mark.parametrize("rule", [{"largest": 2}, {"diagonal": "AG"}])
def test_blocks_and_diagonals(rule):
    """Oracle: the dense solve with the blocks that the rule keeps, the rest being 0."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3)).double()
    coverage = mpikfac.Coverage(rule=lambda layer: dataclasses.replace(layer, **rule))
    kfac = trained(model, coverage=coverage)
    state = {n: unfold_triangle(v) for n, v in kfac.state_dict().items() if "/factors/" in n}
    g, a = (
        torch.block_diag(
            *(m for n, v in state.items() if side in n for m in v.view(-1, *v.shape[-2:]))
        )
        for side in (".G", ".A")
    )
    c, v = torch.kron(g, a), vectors(model)
    b = torch.cat([v["1.weight"], v["1.bias"][:, None]], 1).flatten()
    found = Curvature.of(kfac).solve(v, 0.1)
    x = torch.cat([found["1.weight"], found["1.bias"][:, None]], 1).flatten()
    expected = torch.linalg.solve(c + 0.1 * torch.eye(len(c), dtype=F64), b)
    torch.testing.assert_close(x, expected, **EXACT)


def test_uncovered_parameters_are_refused_by_name():
    """Oracle: the parameters of the normalisation, by name; with `skip`, results leave them out."""
    model = nn.Sequential(nn.Conv2d(2, 2, 2), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3))
    kfac = trained(model.double())
    with pytest.raises(mpikfac.UserError, match=r"no factors cover 1\.bias, 1\.weight; pass skip="):
        Curvature.of(kfac)
    found = Curvature.of(kfac, skip=["1"]).solve(vectors(model))
    assert {*found} == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_wrong_vectors_are_refused(kfac):
    """Oracle: one line with the parameter's name."""
    curvature, v = Curvature.of(kfac), vectors(kfac.model)
    with pytest.raises(ValueError, match="5.bias is missing"):
        curvature.solve({name: t for name, t in v.items() if name != "5.bias"})
    with pytest.raises(ValueError, match="head is not a covered parameter"):
        curvature.solve(v | {"head": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"the vector's 5\.bias is \[2\], but the parameter is \[3\]"
    ):
        curvature.solve(v | {"5.bias": torch.zeros(2)})
    with pytest.raises(ValueError, match="damping=-1.0 must be a finite number >= 0"):
        curvature.solve(v, -1.0)
    with pytest.raises(ValueError, match="layer='9' must be one of 0, 3, 5"):
        curvature.eigenvalues("9")


def test_factors_without_a_batch_are_refused():
    """Oracle: one line, before the first step, and for a layer that was never called."""
    with pytest.raises(mpikfac.UserError, match=r"no factor 0\.A: its run took no step"):
        Curvature.of(trained(network(), steps=0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3)).double()
    model.add_module("unused", nn.Identity())
    model.unused.inner = nn.Linear(2, 2).double()
    with pytest.raises(
        mpikfac.UserError, match=r"unused\.inner\.A' has not been updated with a batch"
    ):
        Curvature.of(trained(model))


def test_factors_of_no_fisher_matrix_are_refused():
    """Oracle: preconditioners and estimators whose factors are something else, one line each."""
    with pytest.raises(mpikfac.UserError, match="fisher_type='forward-only'"):
        Curvature.of(trained(network(), estimator=mpikfac.Estimator(fisher_type="forward-only")))
    with pytest.raises(mpikfac.UserError, match=r"the state has no factor 0\.A"):
        Curvature.of(trained(network(), preconditioner="shampoo"))


def test_weights_that_differ_between_ranks_are_refused(kfac, tmp_path):
    """Oracle: one line, for a state as local steps leave it, with the weights of each rank."""
    state = kfac.state_dict() | {"copies/1/model/5.bias": torch.zeros(3, dtype=F64)}
    mpikfac.save_checkpoint(mpikfac.world(), tmp_path, state, kfac.steps)
    with pytest.raises(mpikfac.UserError, match="ranks had different weights; average them"):
        Curvature.load(tmp_path, network())


def test_the_damping_of_the_run_is_known(kfac):
    """Oracle: the trainer's setting."""
    assert Curvature.of(trained(network(), damping=0.3)).damping == mpikfac.Damping(0.3)
    assert Curvature.of(kfac).damping.is_relative
