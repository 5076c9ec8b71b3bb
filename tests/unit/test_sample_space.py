"""Gauss-Newton steps in sample space, compared with dense Jacobians and least squares."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn

import mpikfac
from mpikfac.lab import SampleSpace, Term, jet
from mpikfac.lab.sample_space.parameters import Parameters
from mpikfac.lab.sample_space.products import along, chunks, combine, gram
from mpikfac.lab.sample_space.records import record
from support.residuals import F64, dense, flat, functions, network, points, terms, unknown

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-10, "atol": 1e-10}
PARTS = {"interior": points(9), "border": points(5, 2), "pair": points(4, 3)}


def space(model, nu, parts=None, **settings):
    return SampleSpace(model, terms(nu, parts or PARTS), also=[nu], **settings)


def damped(jacobian, target, damping, start=0.0):
    """Return `argmin |J d - target|^2 + damping |d - start|^2`, by least squares."""
    n = jacobian.shape[1]
    root = math.sqrt(damping) * torch.eye(n, dtype=F64)
    right = torch.cat([target, root @ (torch.zeros(n, dtype=F64) + start)])
    return torch.linalg.lstsq(torch.cat([jacobian, root]), right).solution


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [128, 3])
def test_products_are_those_of_the_dense_jacobian(monkeypatch, chunk):
    """Oracle: the Jacobian of residuals with nested derivatives, by torch.func."""
    monkeypatch.setattr("mpikfac.lab.sample_space.products.CHUNK", chunk)
    model, nu = network(), unknown()
    parameters = Parameters(model, [nu])
    r, jacobian = dense(model, nu, PARTS)
    found = [
        record(model, parameters, term, math.sqrt(term.weight / term.count), True)
        for term in terms(nu, PARTS)
    ]
    rows = [part for of_term, _ in found for part in chunks(of_term)]
    torch.testing.assert_close(torch.cat([values for _, values in found]), r, **EXACT)
    torch.testing.assert_close(gram(rows, rows), jacobian @ jacobian.T, **EXACT)
    torch.testing.assert_close(
        gram(rows[:1], rows[1:]), gram(rows, rows)[: len(rows[0][0].a), len(rows[0][0].a) :]
    )
    # The matrices of a vector hold weight and bias; `views` gives them by parameter.
    names = [*dict(model.named_parameters()), "also/0"]
    coefficients, v = torch.randn(len(r), dtype=F64), torch.randn(parameters.size, dtype=F64)
    total = torch.zeros(parameters.size, dtype=F64)
    of_rows = coefficients.split([len(part[0].a) for part in rows])
    for part, own in zip(rows, of_rows):
        combine(part, own, parameters.split(total))
    views = parameters.views(total)
    ordered = torch.cat([views[name].flatten() for name in names])
    torch.testing.assert_close(ordered, jacobian.T @ coefficients, **EXACT)
    views = parameters.views(v)
    ordered = torch.cat([views[name].flatten() for name in names])
    products = torch.cat([along(part, parameters.split(v)) for part in rows])
    torch.testing.assert_close(products, jacobian @ ordered, **EXACT)


class Products(nn.Module):
    """A network whose result is a product of two features, which are returned, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        p = self.last(self.layers(x))
        return p[:, :1] * p[:, 1:].sin(), p


def variable(model, x):
    u, _ = model(jet(x))
    coefficients = torch.stack([x[:, 0], x[:, 1] - 0.5, 0 * x[:, 2]], 1)
    return (coefficients * u.second).sum(1) + u.value * u.first[:, 0]


def mixed(model, x):
    u, p = model(jet(x))
    return torch.stack([u.second.sum(1), p.second[:, 0, 0] + p.second[:, 1, 1] ** 2], 1)


@pytest.mark.parametrize(
    ("residual", "streams"),
    [(variable, [5, 5, 5]), (mixed, [7, 7, 7])],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_second_derivatives_are_one_stream_unless_outputs_are_mixed(residual, streams):
    """Oracle: rows of autograd; the number of streams by hand."""
    model, x = Products().double(), torch.rand(7, 3, dtype=F64)
    x[3, :2] = torch.tensor([0.0, 0.5])  # where no second derivative counts
    term = Term(residual, x)
    rows, _ = record(model, Parameters(model), term, 1.0, True)
    r = residual(model, x).view(7, -1).mT.flatten()
    exact = [torch.autograd.grad(e, [*model.parameters()], retain_graph=True) for e in r]
    jacobian = torch.stack([torch.cat([g.flatten() for g in of_row]) for of_row in exact])
    torch.testing.assert_close(gram([rows], [rows]), jacobian @ jacobian.T, **EXACT)
    assert [block.streams for block in rows] == streams


def test_positions_and_operations_in_place_are_recorded():
    """Oracle: a row of autograd, which the first step compares; and dense least squares."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 2)).double()
    x = torch.randn(6, 5, 3, dtype=F64)  # five positions of a point

    def mean(model, x):
        return model(x).mean(1) - 1

    r = (mean(model, x) / math.sqrt(6)).T.flatten()
    rows = [torch.autograd.grad(e, [*model.parameters()], retain_graph=True) for e in r]
    jacobian = torch.stack([torch.cat([g.flatten() for g in of_row]) for of_row in rows])
    before = flat(model, torch.empty(0))
    SampleSpace(model, [Term(mean, x)], lengths=[1.0], acceleration=False).step()
    expected = before - damped(jacobian, r.detach(), 1e-3)
    torch.testing.assert_close(flat(model, torch.empty(0)), expected, **EXACT)


def test_a_programs_hooks_may_change_outputs():
    """Oracle: the rows of autograd, with which the first step compares."""
    model = network()
    model.first.register_forward_hook(lambda module, inputs, output: 2 * output)
    steps = SampleSpace(model, [Term(border, points(5))])
    model.middle.register_forward_hook(lambda module, inputs, output: output + 1)
    assert steps.step().length


def test_a_few_parameters_of_other_layers_can_be_trained():
    """Oracle: dense least squares, with rows of autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = points(6)
    r = border(model, x) / math.sqrt(6)
    rows = [torch.autograd.grad(e, [*model.parameters()], retain_graph=True) for e in r]
    jacobian = torch.stack([torch.cat([g.flatten() for g in of_row]) for of_row in rows])
    before = flat(model, torch.empty(0))
    settings = {"also": model[1].parameters(), "momentum": 0.5, "acceleration": False}
    steps = SampleSpace(model, [Term(border, x)], **settings)
    length = steps.step().length
    expected = before - length * damped(jacobian, r.detach(), 1e-3)
    torch.testing.assert_close(flat(model, torch.empty(0)), expected, **EXACT)
    assert "sample/momentum/1.weight" in steps.state_dict()


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_is_a_damped_least_squares_solution():
    """Oracle: dense least squares in weight space, with torch.func's Jacobian."""
    model, nu = network(), unknown()
    r, jacobian = dense(model, nu, PARTS)
    before, direction = flat(model, nu), damped(jacobian, r, 0.5)
    report = space(model, nu, damping=0.5, acceleration=False).step()
    torch.testing.assert_close(flat(model, nu), before - report.length * direction, **EXACT)
    after, _ = dense(model, nu, PARTS)
    change = report.length * jacobian @ direction
    predicted = r @ change - change @ change / 2
    numbers = [report.loss, report.new_loss, report.ratio, report.relative_damping]
    mean = jacobian.square().sum() / len(r)
    losses = r @ r / 2, after @ after / 2
    expected = [*losses, (losses[0] - losses[1]) / predicted, 0.5 / mean]
    torch.testing.assert_close(torch.tensor(numbers), torch.stack(expected).float())
    assert (report.damping, report.tries) == (0.5, 1)


def test_a_linear_model_needs_one_step():
    """Oracle: the damped normal equations, and interpolation with more weights than residuals."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=F64), torch.randn(20, 2, dtype=F64)

    def fit(model, batch):
        return model(batch[0]) - batch[1]

    model = nn.Linear(3, 2).double()
    start = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    report = SampleSpace(model, [Term(fit, (x, y))], damping=1e-4).step()
    ones = torch.cat([x, torch.ones(20, 1, dtype=F64)], 1)
    products = ones.T @ ones / 20 + 1e-4 * torch.eye(4, dtype=F64)
    solution = torch.linalg.solve(products, (ones.T @ y) / 20 + 1e-4 * start.T).T
    found = torch.cat([model.weight, model.bias[:, None]], 1)
    torch.testing.assert_close(found, solution, **EXACT)
    assert report.length == 1 and abs(report.ratio - 1) < 1e-10
    report = SampleSpace(model, [Term(fit, (x[:4], y[:4]))], damping=1e-14).step()
    assert report.new_loss < 1e-20


def test_momentum_continues_the_last_direction():
    """Oracle: the least squares that define SPRING, `|J d - r|^2 + damping |d - mu last|^2`."""
    model, nu = network(), unknown()
    steps, last = space(model, nu, damping=0.1, momentum=0.8, acceleration=False), 0.0
    for _ in range(3):
        r, jacobian = dense(model, nu, PARTS)
        before, damping = flat(model, nu), steps.damping
        report = steps.step()
        assert report.tries == 1
        last = damped(jacobian, r, damping, 0.8 * last)
        torch.testing.assert_close(flat(model, nu), before - report.length * last, **EXACT)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_a_step_is_bent_where_residuals_curve(momentum):
    """Oracle: dense least squares for the second derivative of residuals by torch.func."""
    (model, nu), (plain, plain_nu) = ((network(), unknown()) for _ in range(2))
    settings = {"damping": 1.0, "momentum": momentum, "lengths": [1.0]}
    steps = space(model, nu, **settings)
    lines = space(plain, plain_nu, acceleration=False, **settings)
    bent = 0
    for _ in range(4):
        lines.load_state_dict(steps.state_dict())
        r, jacobian = dense(model, nu, PARTS)
        before = flat(model, nu)
        line, report = lines.step(), steps.step()
        there, _ = dense(plain, plain_nu, PARTS)
        step = flat(plain, plain_nu) - before
        bend = damped(jacobian, 2 * (there - r - jacobian @ step), line.damping)
        bent += report.new_loss < line.new_loss
        expected = before + step - (bend / 2 if report.new_loss < line.new_loss else 0)
        torch.testing.assert_close(flat(model, nu), expected, **EXACT)
    assert bent >= 2


def test_a_bent_step_can_be_longer():
    """Oracle: a valley along a parabola, whose bottom is reached; a straight step is shorter."""
    lengths = {}
    for acceleration in (False, True):
        v = nn.Parameter(torch.tensor([0.0, 0.0], dtype=F64))
        model = nn.Linear(1, 1).double()

        def valley(model, x, v=v):
            across = 10 * (v[1] - v[0] ** 2)  # of Rosenbrock's function
            return torch.stack([1 - v[0] + 0 * model(x)[0, 0], across])[None]

        steps = SampleSpace(
            model, [Term(valley, points(1)[:, :1])], [v], damping=1e-9, acceleration=acceleration
        )
        lengths[acceleration] = steps.step().length
    assert lengths[False] < lengths[True]


def test_a_step_that_reduces_nothing_is_solved_again():
    """Oracle: dense least squares with the damping of the last try, without momentum."""
    model, nu = network(), unknown()
    steps = space(model, nu, damping=0.01, lengths=[4.0], acceleration=False)
    r, jacobian = dense(model, nu, PARTS)
    before = flat(model, nu)
    report = steps.step()
    assert report.tries > 1 and report.new_loss < report.loss
    assert report.damping == pytest.approx(0.01 * 4 ** (report.tries - 1))
    torch.testing.assert_close(
        flat(model, nu), before - 4 * damped(jacobian, r, report.damping), **EXACT
    )


def test_weights_stay_where_no_length_reduces_the_loss():
    """Oracle: the weights before the step."""
    model, nu = network(), unknown()
    steps = space(model, nu, lengths=[1e9])
    before = flat(model, nu)
    report = steps.step()
    assert report.length == 0 and report.new_loss == report.loss
    assert torch.equal(flat(model, nu), before) and steps.damping == pytest.approx(3e-3)


def test_the_damping_stays_usable_after_convergence():
    """Oracle: dense least squares at other points; a report of convergence; and a loaded state."""
    model = nn.Linear(2, 1).double()

    def fit(model, x):
        return model(x)[:, 0] - (5 * x).sin().prod(1)

    steps = SampleSpace(model, [Term(fit, points(40))])
    for _ in range(40):
        report = steps.step()
    assert (report.length, report.tries) == (0, 1)
    assert steps.damping <= 1e3 * report.damping / report.relative_damping
    steps.load_state_dict(steps.state_dict())
    others = points(40, 9)
    steps.renew(fit=others)
    for _ in range(40):
        report = steps.step()
    inputs, right = torch.cat([others, torch.ones(40, 1)], 1), (5 * others).sin().prod(1)
    solution = torch.linalg.lstsq(inputs, right).solution
    found = torch.cat([model.weight[0], model.bias]).detach()
    torch.testing.assert_close(found, solution, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_an_error_at_a_trial_length_restores_the_weights(error):
    """Oracle: the weights before; the line of the residual."""
    model = network()
    before = flat(model, torch.empty(0))

    def fails(model, x):
        if not torch.equal(flat(model, torch.empty(0)), before):
            raise error("no table for these weights")
        return model(x)[:, 0]

    steps = SampleSpace(model, [Term(fails, points(5))])
    with pytest.raises(mpikfac.UserError if error is ValueError else KeyError, match="no table"):
        steps.step()
    assert torch.equal(flat(model, torch.empty(0)), before)


def test_an_error_while_a_step_is_bent_undoes_the_step():
    """Oracle: the state before the step; the calls at the accepted lengths were without error."""
    model, calls = network(), []

    def fails(model, x):
        calls.append(len(x))
        if len(calls) == limit:
            raise ValueError("no table for these weights")
        return model(x)[:, 0]

    limit = -1
    steps = SampleSpace(model, [Term(fails, points(5))], momentum=0.5)
    steps.step()
    before, state = flat(model, torch.empty(0)), copy.deepcopy(steps.state_dict())
    undisturbed, begun = (
        SampleSpace(copy.deepcopy(model), [Term(lambda m, x: m(x)[:, 0], points(5))], momentum=0.5),
        len(calls),
    )
    undisturbed.load_state_dict(state)
    undisturbed.step()
    limit = begun + undisturbed.trace.calls["losses"] + 1
    with pytest.raises(mpikfac.UserError, match="no table"):
        steps.step()
    assert torch.equal(flat(model, torch.empty(0)), before)
    assert all(
        torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value))
        for name, value in steps.state_dict().items()
    )


@pytest.mark.parametrize("wrong", ["false", None, 0.5])
def test_acceleration_is_a_choice(wrong):
    """Oracle: the line."""
    with pytest.raises(ValueError, match="acceleration="):
        SampleSpace(network(), [Term(lambda m, x: m(x)[:, 0], points(5))], acceleration=wrong)


def test_a_source_can_be_a_derivative_of_the_points():
    """Oracle: the same source in closed form."""

    def numeric(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(x.sin().prod(1).sum(), x)
        return model(x.detach())[:, 0] - slope[:, 0]

    def closed(model, x):
        return model(x)[:, 0] - x[:, 0].cos() * x[:, 1].sin()

    found, right = (SampleSpace(network(), [Term(f, points(5))]).step() for f in (numeric, closed))
    assert found.new_loss == pytest.approx(right.new_loss) and found.new_loss < found.loss


@pytest.mark.parametrize(("length", "factor"), [(1.0, 1 / 3), (0.5, 1 / 3), (0.25, 1), (1 / 32, 3)])
def test_damping_follows_the_length(length, factor):
    """Oracle: the rule of the documentation."""
    model, nu = network(), unknown()
    steps = space(model, nu, damping=1.0, lengths=[length])
    assert steps.step().length == length
    assert steps.damping == pytest.approx(factor)


def test_renewed_points_are_those_of_the_next_step():
    """Oracle: a trainer that starts with these points and the weights of this one."""
    models, nu = [network(), network()], [unknown(), unknown()]
    others = {"interior": points(7, 8), "border": points(3, 9), "pair": PARTS["pair"]}
    first, second = space(models[0], nu[0]), space(models[1], nu[1], others)
    first.step()
    second.load_state_dict(first.state_dict())
    first.renew(interior=others["interior"], border=others["border"])
    assert first.step() == second.step()
    assert torch.equal(flat(models[0], nu[0]), flat(models[1], nu[1]))


def test_a_loaded_state_continues_exactly():
    """Oracle: a run of all steps, with momentum."""
    nu, others = unknown(), unknown()
    straight, resumed = space(network(), nu, momentum=0.5), space(network(5), others, momentum=0.5)
    for _ in range(2):
        straight.step()
    resumed.load_state_dict(straight.state_dict())
    for _ in range(2):
        assert resumed.step() == straight.step()
    assert resumed.steps == 4
    assert torch.equal(flat(resumed.model, others), flat(straight.model, nu))


def test_float32_is_allowed_with_a_warning(caplog):
    """Oracle: the loss, and the line."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def fit(model, x):
        return model(x)[:, 0] - x.prod(1)

    with caplog.at_level(logging.WARNING, "mpikfac"):
        steps = SampleSpace(model, [Term(fit, points(30).float())])
    assert "the model is in torch.float32" in caplog.text
    reports = [steps.step() for _ in range(5)]
    assert reports[-1].new_loss < 0.1 * reports[0].loss
    assert model[0].weight.dtype == torch.float32


# -- refusals --------------------------------------------------------------------------------------


def border(model, x):
    return model(x)[:, 0]


def double_backward(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope[:, 0]


def transformed(model, x):
    return torch.func.vmap(torch.func.grad(lambda y: model(y[None]).sum()))(x)[:, 0]


def around_the_layer(model, x):
    return model(x)[:, 0] + model.first.weight.sum()


def dependent(model, x):
    u = model(x)[:, 0]
    return u * u.mean()


def middle_column(model, x):
    u = model(x)[:, 0]
    return torch.stack([u - 1, u + 5 * model.first.weight.sum(), u - x[:, 0]], 1)


def middle_point(model, x):
    u = model(x)[:, 0]
    return u + (torch.arange(len(x)) == 2) * model.first.weight.sum()


def of_float32(model, x):
    return model(x.float())[:, 0]


def joined(model, x):
    both = model(torch.cat([x, x + 1]))[:, 0]
    return both[: len(x)] - both[len(x) :]


def without_parameters(model, x):
    return model(x).detach()[:, 0]


BAD_RESIDUALS = {
    double_backward: "runs a backward pass through layer .*mpikfac.lab.jet",
    transformed: "inside a torch.func transform, so .* the derivatives; .*mpikfac.lab.jet",
    around_the_layer: "'first.weight' differs from autograd's .* only by calling its layer",
    dependent: "differs from autograd's",
    middle_column: "'first.weight' differs from autograd's",
    middle_point: "'first.weight' differs from autograd's",
    of_float32: r"'first' of torch.float64 with torch.float32; .* with points.double\(\)",
    joined: "with 10 rows for 5 points; .* call the model several times",
    without_parameters: "do not depend on a trained parameter",
}


@pytest.mark.parametrize("residual", BAD_RESIDUALS, ids=lambda f: f.__name__)
def test_residuals_that_cannot_be_recorded_are_refused(residual):
    """Oracle: one line that names the term or parameter, and the remedy."""
    model = network()
    steps = SampleSpace(model, [Term(residual, points(5))])
    before = flat(model, torch.empty(0))
    with pytest.raises(mpikfac.UserError, match=BAD_RESIDUALS[residual]):
        steps.step()
    assert torch.equal(flat(model, torch.empty(0)), before)


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (lambda m, x: m(x).square().mean(), "must return residuals .*, not one number"),
        (lambda m, x: m(x)[1:, 0], r"must return residuals .* but returned \[4\] for 5 points"),
        (lambda m, x: m(x) - x[:, 0], r"\[9, 9\] for 9 points: a dimension of size 1 was"),
        (lambda m, x: m(x) - x[:, 0], r"\[5, 5\] for 5 points: .* to 5; write model\(x\)"),
        (lambda m, x: m(x) - torch.arange(5), r"\[5, 5\] for 5 points: .* to 5; write model"),
        (
            lambda m, x: m(jet(x)).second[:, :1] - x[:, 0],
            r"\[5, 5\] for 5 points: .*u.second\[:, 0",
        ),
        (lambda m, x: m(x)[:, :, None], r"returned \[5, 1, 1\] for 5 points"),
        (lambda m, x: m(jet(x)), "must return a tensor of residuals, not Jet; return parts"),
        (lambda m, x: m(x)[:, 0] / 0, "residuals of term .* are not finite at 5 points"),
    ],
)
def test_other_results_are_refused(returned, line):
    """Oracle: one line with the term, the shape and the remedy."""
    count = 9 if "for 9 points" in line else 5
    with pytest.raises(mpikfac.UserError, match=line):
        SampleSpace(network(), [Term(returned, points(count))]).step()


def test_as_many_equations_as_points_are_taken():
    """Oracle: the loss by its definition, of three equations at three points in a tuple."""

    def three(model, batch):
        return torch.cat([model(batch[0]) ** 2, model(batch[0]) - batch[1]], 1)

    model, x, y = network(), points(3), points(3, 4)
    with torch.no_grad():
        loss = three(model, (x, y)).square().sum() / 6
    assert SampleSpace(model, [Term(three, (x, y))]).step().loss == pytest.approx(float(loss))


def frozen_bias():
    model = network()
    model.first.bias.requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).double(), "'1.weight' of a LayerNorm"),
        (nn.Conv1d(1, 1, 1).double(), "'weight' of a Conv1d cannot be trained"),
        (network().bfloat16(), "first.weight is torch.bfloat16, which is too coarse"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double()), "convert all"),
        (network().requires_grad_(False), "must have a torch.nn.Linear with trained parameters"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)).double(), "cannot be trained"),
        (frozen_bias(), "'first' has a frozen and a trained parameter"),
        (tied(), "layers '0' and '1' share a parameter"),
        (nn.Sequential(nn.Linear(2, 1), nn.Dropout()).double(), "1 is a Dropout in training mode"),
    ],
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_models_that_cannot_be_trained_are_refused(model, line):
    """Oracle: one line with the module or parameter, and the remedy."""
    with pytest.raises(ValueError, match=line):
        SampleSpace(model, [Term(border, points(5))])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"damping": 0.0}, "damping=0.0 must be a number above 0"),
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"lengths": [0.5, 1.0]}, "must be numbers in descending order"),
        ({"lengths": []}, "must be numbers in descending order"),
        ({"lengths": [0]}, "each of lengths=0 must be a number above 0"),
        ({"terms": []}, r"terms=\[\] must contain at least one"),
        ({"terms": Term(border, points(5))}, r"must be a list of .*; pass \[Term"),
        ({"also": unknown()}, r"also must be a list of tensors, .*; pass also=\[...\]"),
        ({"terms": [border]}, r"terms must be mpikfac.lab.Term\(residual, points\), not"),
        (
            {"terms": [Term(border, points(1)), Term(border, points(2))]},
            "2 terms are named 'border'",
        ),
        ({"also": [torch.ones(2)]}, "also must contain leaf tensors that require gradients"),
        ({"also": [nn.Parameter(torch.ones(2)).double()]}, "also must contain leaf tensors"),
        ({"also": [network().last.weight, None]}, "also must contain leaf tensors"),
        ({"also": "last.weight"}, "also must not contain parameters of layer 'last'; remove"),
    ],
)
def test_wrong_arguments_are_refused(settings, line):
    """Oracle: one line with the argument, its value and the right ones."""
    model, arguments = network(), {"terms": [Term(border, points(5))]} | settings
    if arguments.get("also") == "last.weight":
        arguments["also"] = [model.last.weight]
    with pytest.raises(ValueError, match=line):
        SampleSpace(model, **arguments)


@pytest.mark.parametrize("wrong", [(), 3.0, torch.tensor(1.0), (points(2), points(3)), [points(2)]])
def test_points_must_be_tensors_of_equal_length(wrong):
    """Oracle: one line that names the term."""
    with pytest.raises(ValueError, match="the points of term 'border' must be a tensor"):
        Term(border, wrong)
    with pytest.raises(ValueError, match=r"weight=-1 must be a number above 0"):
        Term(border, points(2), weight=-1)


def test_steps_without_points_or_with_too_many_are_refused(monkeypatch):
    """Oracle: one line with the term, or with the bytes."""
    steps = SampleSpace(network(), [Term(border, points(5))])
    steps.renew(border=points(0))
    with pytest.raises(mpikfac.UserError, match="term 'border' has no points on any rank"):
        steps.step()
    monkeypatch.setattr(SampleSpace, "most_residuals", 4)
    steps.renew(border=points(5))
    with pytest.raises(mpikfac.UserError, match="5 residuals need a matrix of 200 bytes"):
        steps.step()
    steps.renew(border=points(3))
    pairs = SampleSpace(network(), [Term(lambda m, x: torch.cat([m(x), m(x)], 1), points(3))])
    with pytest.raises(mpikfac.UserError, match="6 residuals need a matrix"):
        pairs.step()
    never = SampleSpace(network(), [Term(lambda m, x: pytest.fail("it was called"), points(5))])
    with pytest.raises(mpikfac.UserError, match="5 residuals need a matrix"):
        never.step()
    with pytest.raises(ValueError, match="'interior' is not the name of a term; use one of border"):
        steps.renew(interior=points(5))


def test_a_model_with_another_trainer_is_refused(comm):
    """Oracle: one line, until the trainer is closed."""
    model = network()
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    with pytest.raises(ValueError, match=r"the model has a KFAC, .* call its close\(\) first"):
        SampleSpace(model, [Term(border, points(5))])
    kfac.close()
    assert SampleSpace(model, [Term(border, points(5))]).step().length


def test_a_state_that_does_not_fit_is_refused():
    """Oracle: one line with the item; the weights stay."""
    steps, others = space(network(), unknown()), functions(unknown())
    state = steps.state_dict()
    before = flat(steps.model, torch.empty(0))
    for name, value, line in (
        ("sample/damping", -1.0, "item 'sample/damping'=-1.0 must be a number above 0"),
        ("sample/also/0", torch.ones(3), "item 'sample/also/0' must be float64"),
        ("model/first.weight", None, "model/first.weight"),
    ):
        with pytest.raises(mpikfac.UserError, match=line):
            steps.load_state_dict(state | {name: value})
    assert torch.equal(flat(steps.model, torch.empty(0)), before) and len(others) == 3
