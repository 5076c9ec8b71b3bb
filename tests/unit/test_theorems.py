"""Theory of K-FAC: exact cases, approximate cases, and invariances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac.numerics import triangles
from support import inside, oracles, problem

LOSSES = {
    "squared-error": F.mse_loss,
    "cross-entropy": lambda f, y: F.cross_entropy(f, y.argmax(1)),
    "logistic": lambda f, y: F.binary_cross_entropy_with_logits(f, y),
}
EXACT = 1e-10  # rounding
COVERS = {**mpikfac.KINDS, **mpikfac.NORMS}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Over(nn.Module):
    """A mean or a sum over positions `[batch, positions, features]`."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return getattr(x, self.name)(1)


def trainer(comm, model, lr=1.0, **settings):
    """Return K-FAC with negligible damping."""
    settings = {"damping": 1e-30, "kl_clip": None, "preconditioner": "eigen"} | settings
    return problem.kfac(model, torch.optim.SGD(model.parameters(), lr), comm, **settings)


def factors(kfac):
    return {n: triangles.unfold_triangle(packed) for n, packed in inside.factors(kfac).items()}


def recorded(comm, model, x, loss):
    """Return the factors of a batch with the exact Fisher."""
    kfac = trainer(comm, model, fisher_type="type-2")
    outputs = model(x)
    kfac.record(outputs, loss)
    outputs.sum().backward()
    kfac.precondition()
    kfac.detach()
    return factors(kfac)


def products(found):
    """Return `G (x) A` of every layer."""
    names = {name[:-2] for name in found}
    return {name: torch.kron(found[f"{name}.G"], found[f"{name}.A"]) for name in names}


def jacobian(outputs, module):
    """Return derivatives of all outputs by a module's matrix `[outputs, elements]`, by autograd."""
    parameters, rows = list(module.parameters()), []
    for output in outputs.reshape(-1):
        gradients = torch.autograd.grad(output, parameters, retain_graph=True)
        rows.append(torch.cat([g.reshape(len(g), -1) for g in gradients], 1).reshape(-1))
    return torch.stack(rows)


def gauss_newton(model, x, loss):
    """Return every layer's mean of `J^T H J` over examples, H the Hessian of an example's loss."""
    found = dict.fromkeys(oracles.kfac_modules(model), 0)
    for example in x.split(1):
        outputs = model(example)
        hessian = torch.autograd.functional.hessian(loss, outputs.detach())
        hessian = hessian.view(outputs.numel(), outputs.numel())
        for name, module in oracles.kfac_modules(model).items():
            j = jacobian(outputs, module)
            found[name] = found[name] + j.T @ hessian @ j / len(x)
    return found


def errors(found, blocks):
    """Return relative errors of the products, by layer."""
    assert found.keys() == blocks.keys()
    return {name: float((found[name] - b).norm() / b.norm()) for name, b in blocks.items()}


def assert_exact(found, layers, least=0.05):
    """Check that errors of `layers` are rounding errors and all remaining errors are large."""
    for name, error in found.items():
        assert error < EXACT if name in layers else error > least, (name, error)


# -- a mean of products and a product of means ---------------------------------------------------


def relu_net(bias=True):
    return nn.Sequential(nn.Linear(4, 5, bias), nn.ReLU(), nn.Linear(5, 3, bias)).double()


def decided():
    """Return a network whose units are on, or off, for all examples."""
    model = relu_net()
    model[0].bias.data = torch.tensor([20.0, -20.0, 20.0, 20.0, -20.0]).double()
    return model


def undecided():
    """Return a network that gives all classes the same probability."""
    model = relu_net()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


def inputs():
    return 3 * torch.randn(9, 4).double()


def opposite():
    """Return inputs that differ only in sign."""
    signs = torch.tensor([1.0, -1, -1, 1, 1])
    return (signs[:, None] * torch.randn(4)).double()


NETWORKS = {  # the model, its inputs, the loss, and layers where the product is exact
    "outputs are linear in the last layer": (relu_net, inputs, "squared-error", {"2"}),
    "the same units are on for all": (decided, inputs, "squared-error", {"0", "2"}),
    "Hessians differ": (relu_net, inputs, "cross-entropy", set()),
    "Hessians are the same": (undecided, inputs, "cross-entropy", {"2"}),
    "a a^T is the same": (lambda: relu_net(False), opposite, "cross-entropy", {"0"}),
    "one example": (relu_net, lambda: inputs()[:1], "cross-entropy", {"0", "2"}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_product_is_exact_where_one_of_its_sides_is_the_same_for_all_examples(comm, name):
    """Oracle: the mean of J^T H J by autograd. In all remaining layers the product approximates."""
    make, of, loss, layers = NETWORKS[name]
    model, x = make(), of()
    blocks = gauss_newton(model, x, lambda f: LOSSES[loss](f, torch.zeros_like(f)))
    used = {name: block for name, block in blocks.items() if block.any()}
    found = products(recorded(comm, model, x, loss))
    assert all(not found[name].any() for name in blocks.keys() - used.keys())
    assert_exact(errors({name: found[name] for name in used}, used), layers)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_error_of_the_product_is_the_covariance_of_its_sides(comm, loss):
    """Oracle: J^T H J by autograd; the covariance over examples, from batches of one."""
    model, x = relu_net(), inputs()
    whole, *alone = (recorded(comm, model, part, loss) for part in (x, *x.split(1)))
    blocks = gauss_newton(model, x, lambda f: LOSSES[loss](f, torch.zeros_like(f)))
    for name, block in blocks.items():
        a, g = f"{name}.A", f"{name}.G"
        terms = [torch.kron(one[g] - whole[g], one[a] - whole[a]) for one in alone]
        expected = torch.kron(whole[g], whole[a]) + sum(terms) / len(terms)
        torch.testing.assert_close(block, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("preconditioner", ["eigen", "eva"])
def test_of_one_example_the_product_is_the_outer_product_of_its_gradient(comm, preconditioner):
    """Oracle: autograd's gradient; `(v v^T + damping I)^-1 v = v / (|v|^2 + damping)`."""
    front = nn.Conv2d(2, 3, (2, 3)), nn.Tanh(), nn.Flatten()  # of one position
    model = nn.Sequential(*front, nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    kfac = trainer(comm, model, preconditioner=preconditioner, damping=0.3)
    F.cross_entropy(model(torch.randn(1, 2, 2, 3).double()), torch.tensor([2])).backward()
    modules = oracles.kfac_modules(model)
    gradients = {name: oracles.gradient_matrix(module) for name, module in modules.items()}
    kfac.precondition()
    if preconditioner == "eigen":
        found = products(factors(kfac))
        for name, gradient in gradients.items():
            v = gradient.reshape(-1)
            torch.testing.assert_close(found[name], torch.outer(v, v), rtol=EXACT, atol=EXACT)
    for name, gradient in gradients.items():
        expected = gradient / (gradient.square().sum() + 0.3)
        torch.testing.assert_close(oracles.gradient_matrix(modules[name]), expected)


# -- weights that an example uses at several positions [Eschenhagen et al. 2023] ------------------


def circular(*sizes):
    return nn.Conv2d(*sizes, 3, padding=1, padding_mode="circular")


SHARED = {  # a linear network, an example's input, and layers where "expand", "reduce" are exact
    "each token has a loss": (
        lambda: [nn.Linear(4, 3), nn.Linear(3, 2, bias=False)],
        (5, 4),
        ({"0", "1"}, set()),
    ),
    "each pixel has a loss": (
        lambda: [nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)],
        (2, 2, 3),
        ({"0", "1"}, set()),
    ),
    "each pixel has a loss of several pixels": (  # a pixel uses a weight several times
        lambda: [nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)],
        (2, 4, 4),
        ({"1"}, set()),
    ),
    "the loss of a mean of tokens": (
        lambda: [nn.Linear(4, 3), nn.Linear(3, 3), Over("mean"), nn.Linear(3, 2)],
        (5, 4),
        ({"3"}, {"0", "1", "3"}),
    ),
    "the loss of a sum of tokens": (
        lambda: [nn.Linear(4, 3, bias=False), nn.Linear(3, 2), Over("sum")],
        (5, 4),
        (set(), {"0", "1"}),
    ),
    "the loss of a mean of pixels": (  # all positions of both layers have the same gradient
        lambda: [
            *(circular(2, 3), circular(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(4, 2),
        ],
        (2, 3, 4),
        ({"4"}, {"0", "1", "4"}),
    ),
    "the loss of a mean of pixels, with margins": (  # fewer pixels of the second layer see margins
        lambda: [
            *(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(4, 2),
        ],
        (2, 4, 4),
        ({"4"}, {"1", "4"}),
    ),
}


@pytest.mark.parametrize("side", [0, 1], ids=["expand", "reduce"])
@pytest.mark.parametrize("name", SHARED)
def test_each_way_to_share_is_exact_in_its_setting_and_not_in_the_others(comm, name, side):
    """Oracle: the mean of J^T J over examples by autograd, for half the squared error.

    Every example comes once for every output of the n outputs, with labels off by sqrt(n) times the
    rows of an orthogonal matrix. The labels' second moments are the second moments of the model's
    own N(f(x), I), for any positions: the Fisher has no sampling error.
    """
    make, shape, layers = SHARED[name]
    model, x = nn.Sequential(*make()).double(), torch.randn(4, *shape).double()
    n = model(x[:1]).numel()
    rotation, _ = torch.linalg.qr(torch.randn(n, n).double())
    repeated = x.repeat_interleave(n, 0)

    def rule(layer):
        return replace(mpikfac.default_rule(layer), kfac_approx=("expand", "reduce")[side])

    kfac = trainer(comm, model, rule=rule)
    outputs = model(repeated)
    noise = n**0.5 * rotation.repeat(len(x), 1).view_as(outputs)
    ((outputs - outputs.detach() - noise).square().sum() / len(repeated) / 2).backward()
    kfac.precondition()  # keeps the weights for the Jacobian
    kfac.detach()
    blocks = gauss_newton(model, x, lambda f: f.square().sum() / 2)
    assert_exact(errors(products(factors(kfac)), blocks), layers[side])


# -- steps of Newton's method --------------------------------------------------------------------


REGRESSIONS = {  # models linear in the parameters, and 30 inputs
    "rows": (lambda: [nn.Linear(4, 3)], (4,)),
    "rows, no bias": (lambda: [nn.Linear(4, 3, bias=False)], (4,)),
    "groups": (lambda: [nn.Conv1d(4, 6, 2, groups=2), nn.Flatten()], (4, 2)),
    "depthwise": (lambda: [nn.Conv2d(3, 3, 2, groups=3), nn.Flatten()], (3, 2, 2)),
    "transposed": (lambda: [nn.ConvTranspose1d(4, 3, 1, bias=False), nn.Flatten()], (4, 1)),
    "means of tokens": (lambda: [nn.Linear(4, 3), Over("mean")], (5, 4)),
    "sums of tokens": (lambda: [nn.Linear(4, 3, bias=False), Over("sum")], (5, 4)),
    "means of pixels": (
        lambda: [nn.Conv2d(2, 3, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        (2, 4, 4),
    ),
    "words": (lambda: [nn.Embedding(5, 3)], ()),
    "bags of words": (lambda: [nn.Embedding(5, 3), Over("mean")], (7,)),
    "scales and shifts": (lambda: [nn.LayerNorm(3)], (3,)),
    "scales of maps": (
        lambda: [nn.GroupNorm(2, 4), nn.AvgPool1d(2), nn.Flatten()],
        (4, 2),
    ),
}


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
@pytest.mark.parametrize("name", REGRESSIONS)
def test_one_step_of_a_linear_regression_reaches_its_least_squares(comm, name, preconditioner):
    """Oracle: `torch.linalg.lstsq` of the outputs' derivatives by the parameters."""
    make, shape = REGRESSIONS[name]
    model = nn.Sequential(*make()).double()
    x = torch.randn(30, *shape).double()
    if isinstance(model[0], nn.Embedding):
        x = torch.randint(5, (30, *shape))

    def rule(layer):  # "reduce" takes whole matrices of words, which appear together
        whole = mpikfac.default_rule(layer)
        return replace(whole, kfac_approx="reduce", diagonal="") if len(shape) else whole

    y, parameters = torch.randn_like(model(x)), list(model.parameters())
    design = [
        torch.cat([d.flatten() for d in torch.autograd.grad(o, parameters, retain_graph=True)])
        for o in model(x).reshape(-1)
    ]
    expected = torch.linalg.lstsq(torch.stack(design), y.reshape(-1)).solution
    before = torch.cat([p.detach().flatten() for p in parameters])
    kfac = trainer(
        comm, model, fisher_type="type-2", covers=COVERS, preconditioner=preconditioner, rule=rule
    )
    outputs = model(x)
    kfac.record(outputs, "squared-error")
    F.mse_loss(outputs, y).backward()
    kfac.step()
    found = torch.cat([p.detach().flatten() for p in parameters])
    assert (before - expected).norm() > 0.1 * expected.norm()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


# -- invariances of a step [Martens & Grosse 2015] ------------------------------------------------


class Affine(nn.Module):
    """A fixed affine map between layers."""

    def __init__(self, matrix, shift):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("shift", shift)

    def forward(self, x):
        return x @ self.matrix.T + self.shift


WIDTHS = 3, 4, 4, 2


def reparametrised(model, before, after):
    """Return the same function with layers between affine maps: inputs, outputs, weights differ."""
    between = []
    for linear, (omega, move), (phi, shift) in zip(model[::2], before, after):
        inner = nn.Linear(linear.in_features, linear.out_features).double()
        weight = linear.weight @ torch.linalg.inv(omega)
        inner.weight.data = torch.linalg.solve(phi, weight).detach()
        bias = linear.bias - weight @ move - shift
        inner.bias.data = torch.linalg.solve(phi, bias).detach()
        between += [Affine(omega, move), inner, Affine(phi, shift), nn.Tanh()]
    return nn.Sequential(*between[:-1])


def network():
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:])
    layers = [module for pair in pairs for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def affine(width):
    """Return a well-conditioned matrix and a shift."""
    matrix = torch.eye(width) + 0.3 * torch.randn(width, width)
    return matrix.double(), 0.5 * torch.randn(width).double()


def function_after(make_step, model):
    """Return outputs for further inputs after three steps."""
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, 40, WIDTHS[0], generator=generator).double()
    y = torch.randn(40, WIDTHS[-1], generator=generator).double()
    step = make_step(model)
    for _ in range(3):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        step()
    return model(other).detach()


@pytest.mark.parametrize("kl_clip", [None, 0.01])
@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", problem.UNSPLIT])
def test_without_damping_a_step_is_the_same_in_all_affine_coordinates(
    comm, preconditioner, kl_clip
):
    """Oracle: the function of the network without maps between layers, after the same steps.

    Steps of plain SGD, and of K-FAC with damping, depend on coordinates.
    """

    def stepping(damping):
        settings = {
            "damping": damping,
            "preconditioner": preconditioner,
            "kl_clip": kl_clip,
            "inv_update_steps": 1,
        }
        return lambda model: trainer(comm, model, lr=0.2, **settings).step

    def descending(model):
        return torch.optim.SGD(model.parameters(), lr=0.2).step

    before, after = ([affine(w) for w in widths] for widths in (WIDTHS[:-1], WIDTHS[1:]))
    models = network(), reparametrised(network(), before, after)
    torch.testing.assert_close(*(function_after(lambda _: int, model) for model in models))
    start = function_after(lambda _: int, network())
    for make_step, same in ((stepping(1e-30), True), (stepping(0.1), False), (descending, False)):
        plain = function_after(make_step, network())
        found = function_after(make_step, reparametrised(network(), before, after))
        difference = (found - plain).norm() / (plain - start).norm()
        assert difference < 1e-8 if same else difference > 0.05, difference
