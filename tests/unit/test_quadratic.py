"""Step length and momentum from the damped quadratic model of a batch."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import (
    CommOpt,
    LevenbergMarquardt,
    MemOpt,
    NoGrafting,
    Strategy,
    Transport,
    UserError,
)
from mpikfac.lab import QuadraticModel
from mpikfac.lab.quadratic_model.graft import Batch, inner_products, lowest, slopes_and_curvatures
from support import inside, problem

pytestmark = pytest.mark.lab

DAMPING = 0.05
QUADRATIC = {"grafting": QuadraticModel(), "damping": DAMPING}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Attention(nn.Module):
    """Words, attention of the words to each other, and a layer of the mean."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, words):
        x = self.words(words)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def tanh_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutions():
    front = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*front, nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3))


NETWORKS = {
    "tanh": (tanh_net, lambda: torch.randn(6, 4).double()),
    "convolutions": (convolutions, lambda: torch.randn(6, 2, 6, 6).double()),
    "attention": (Attention, lambda: torch.randint(7, (6, 3))),
}
LOSSES = {
    "cross-entropy": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "squared-error": lambda f, y: F.mse_loss(f, F.one_hot(y, 3).double()),
    "logistic": lambda f, y: F.binary_cross_entropy_with_logits(f, F.one_hot(y, 3).double()),
}


def labels():
    return torch.tensor([0, 1, 2, 2, 1, 0])


def flat(values):
    return torch.cat([value.detach().reshape(-1) for value in values])


def dense(model, x, loss):
    """Return the gradient `[p]` and the Gauss-Newton matrix `[p, p]` of the loss, by autograd."""
    parameters, outputs = list(model.parameters()), model(x)
    rows = [
        flat(torch.autograd.grad(o, parameters, retain_graph=True)) for o in outputs.reshape(-1)
    ]
    jacobian, at = torch.stack(rows), outputs.detach()
    hessian = torch.autograd.functional.hessian(loss, at).reshape(len(rows), len(rows))
    slope = torch.autograd.functional.jacobian(loss, at).reshape(-1)
    return jacobian.T @ slope, jacobian.T @ hessian @ jacobian


def trainer(comm, model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return problem.kfac(
        model, optimizer, comm, **(QUADRATIC | {"preconditioner": "eigen"} | settings)
    )


def take_step(kfac, x, loss, **more):
    """Take a step of `kfac` on a batch."""
    kfac.optimizer.zero_grad()
    loss(kfac.model(x)).backward()
    kfac.grafting.set_batch(x, loss)
    kfac.step(**more)


# -- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_slopes_and_curvatures_of_directions(network, loss):
    """Oracle: the gradient and J^T H J of all parameters, by autograd."""
    make, of = NETWORKS[network]
    model, x = make().double(), of()
    named = dict(model.named_parameters())
    directions = [{n: torch.randn_like(p) for n, p in named.items()} for _ in range(2)]
    criterion = functools.partial(LOSSES[loss], target=labels())
    if loss != "cross-entropy":
        criterion = functools.partial(LOSSES[loss], y=labels())
    slopes, curvatures = slopes_and_curvatures(model, Batch((x,), criterion), directions)
    gradient, matrix = dense(model, x, criterion)
    vectors = torch.stack([flat(direction.values()) for direction in directions])
    torch.testing.assert_close(slopes, vectors @ gradient)
    torch.testing.assert_close(curvatures, vectors @ matrix @ vectors.T)


def test_passes_leave_no_trace():
    """Oracle: buffers and random numbers before; with dropout, alike passes have alike products."""
    model = nn.Sequential(convolutions(), nn.Dropout(0.5)).double()
    before = [buffer.clone() for buffer in model.buffers()]
    named = dict(model.named_parameters())
    direction = {name: torch.randn_like(p) for name, p in named.items()}
    state = torch.get_rng_state()
    x = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    batch = Batch((x,), lambda f: f.square().mean())
    _, curvatures = slopes_and_curvatures(model, batch, [direction, direction])
    assert torch.equal(curvatures, curvatures[0, 0].expand(2, 2))
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), before))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.grad is not None for p in model.parameters())


def test_products_of_directions_with_missing_names():
    """Oracle: vectors with zeros at missing names."""
    a, b = torch.randn(3), torch.randn(2, 2)
    directions = [{"a": a, "b": b}, {"b": 2 * b}, {"a": a}]
    vectors = [[*a, *b.flatten()], [0, 0, 0, *2 * b.flatten()], [*a, 0, 0, 0, 0]]
    expected = torch.tensor(vectors, dtype=torch.float64)
    found = inner_products(directions, directions[:2])
    torch.testing.assert_close(found, expected @ expected[:2].T, rtol=1e-6, atol=1e-6)


def test_the_lowest_point():
    """Oracle: `torch.linalg.solve`, at scales that differ by 1e8; parallel directions share."""
    root, slopes = torch.randn(3, 3).double(), torch.randn(3).double()
    scales = torch.tensor([1e-4, 1.0, 1e4]).double()
    matrix = scales[:, None] * (root @ root.T) * scales
    torch.testing.assert_close(lowest(slopes, matrix), torch.linalg.solve(matrix, slopes))
    twice = torch.tensor([[4.0, 4.0], [4.0, 4.0]]).double()
    torch.testing.assert_close(lowest(twice[0], twice), torch.full((2,), 0.5).double())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_is_lowest_where_there_are_no_numbers(bad):
    """Oracle: 0: a direction of zeros has no length, and numbers that are not finite no minimum."""
    matrix, slopes = torch.diag(torch.tensor([2.0, 0.0])), torch.tensor([1.0, 0.0])
    assert lowest(slopes, matrix).tolist() == [0.5, 0.0]
    assert lowest(slopes, matrix + bad).tolist() == [0.0, 0.0]


# -- steps ---------------------------------------------------------------------------------------


def parts(plain, loss, x):
    """Return K-FAC's directions and uncovered parameters' gradients, each as a vector."""
    plain.optimizer.zero_grad()
    loss(plain.model(x)).backward()
    plain.precondition()
    covered = {id(p) for layer in inside.layers(plain) for p in layer.parameters}
    every = list(plain.model.parameters())
    directions = [p.grad if id(p) in covered else 0 * p for p in every]
    uncovered = [0 * p if id(p) in covered else p.grad for p in every]
    return flat(directions), flat(uncovered)


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse"])
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_minimise_the_model_over_their_directions(comm, network, preconditioner):
    """Oracle: the dense Gauss-Newton matrix, and directions of K-FAC without a quadratic model."""
    make, of = NETWORKS[network]
    model, twin, x = make().double(), make().double(), of()
    loss = functools.partial(F.cross_entropy, target=labels())
    kfac = trainer(comm, model, preconditioner=preconditioner)
    plain = trainer(comm, twin, preconditioner=preconditioner, grafting=NoGrafting())
    last = torch.zeros(0)
    for _ in range(4):
        twin.load_state_dict(model.state_dict())
        with plain.no_recording():
            gradient, matrix = dense(twin, x, loss)
        vectors = torch.stack([v for v in (*parts(plain, loss, x), last) if v.any()])
        damped = matrix + DAMPING * torch.eye(len(matrix))
        small = vectors @ damped @ vectors.T
        expected = torch.linalg.solve(small, vectors @ gradient) @ vectors
        before = flat(model.parameters())
        take_step(kfac, x, loss)
        last = before - flat(model.parameters())
        torch.testing.assert_close(last, expected)
        predicted = expected @ damped @ expected / 2 - expected @ gradient
        torch.testing.assert_close(inside.predicted_change(kfac)[0], predicted)
    assert len(vectors) == {"tanh": 2, "convolutions": 3, "attention": 2}[network]


def test_one_step_of_a_linear_regression_is_newtons(comm):
    """Oracle: `torch.linalg.lstsq`; the length is 1, and the loss falls as predicted."""
    model, x = nn.Linear(4, 3).double(), torch.randn(30, 4).double()
    y = torch.randn(30, 3).double()
    kfac = trainer(
        comm, model, damping=LevenbergMarquardt(1e-12, min_damping=1e-12), fisher_type="type-2"
    )
    loss = functools.partial(F.mse_loss, target=y)
    outputs = model(x)
    kfac.record(outputs, "squared-error")
    before = loss(outputs)
    before.backward()
    kfac.grafting.set_batch(x, loss)
    kfac.step()
    expected = torch.linalg.lstsq(torch.cat([x, torch.ones(30, 1)], 1), y).solution
    found = torch.cat([model.weight, model.bias[:, None]], 1)
    torch.testing.assert_close(found.detach(), expected.T)
    assert kfac.update_damping(before.item(), loss(model(x)).item()) == pytest.approx(1)


def test_on_a_quadratic_function_the_loss_falls_as_predicted_with_momentum(comm):
    """Oracle: the loss, less the damping's part of the model; and more than without momentum."""
    model, x = nn.Linear(4, 3).double(), torch.randn(30, 4).double() * torch.tensor([1.0, 3, 9, 27])
    loss = functools.partial(F.mse_loss, target=torch.randn(30, 3).double())
    kfac = trainer(comm, model)
    for _ in range(5):
        before, start = loss(model(x)), flat(model.parameters())
        take_step(kfac, x, loss)
        square = (flat(model.parameters()) - start).square().sum()
        change = inside.predicted_change(kfac)[0] - DAMPING / 2 * square
        torch.testing.assert_close(loss(model(x)) - before, change)


@pytest.mark.parametrize("part", [slice(0, 2), slice(0, 6)])
def test_curvatures_may_come_from_a_part_of_the_batch(comm, part):
    """Oracle: the dense Gauss-Newton matrix of the part, the gradient of all, and the gradient."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    kfac = trainer(comm, model, skip=["0", "2"])
    loss, some = (functools.partial(F.cross_entropy, target=labels()[of]) for of in (..., part))
    gradient, _ = dense(model, x, loss)
    _, matrix = dense(model, x[part], some)
    before = flat(model.parameters())
    loss(model(x)).backward()
    kfac.grafting.set_batch(x[part], some)
    kfac.step()
    curvature = gradient @ matrix @ gradient + DAMPING * gradient @ gradient
    expected = before - gradient * (gradient @ gradient / curvature)
    torch.testing.assert_close(flat(model.parameters()), expected)


@pytest.mark.parametrize("norm", [0.001, 100.0])
def test_the_prediction_knows_a_bound_on_the_gradient(comm, norm, caplog):
    """Oracle: the slope of the loss along the step, by autograd, and the dense matrix."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    loss = functools.partial(F.cross_entropy, target=labels())
    gradient, matrix = dense(model, x, loss)
    before, kfac = flat(model.parameters()), trainer(comm, model)
    take_step(kfac, x, loss, max_norm=norm)
    step = flat(model.parameters()) - before
    curvature = step @ matrix @ step + DAMPING * step @ step
    torch.testing.assert_close(inside.predicted_change(kfac)[0], gradient @ step + curvature / 2)
    assert "has slope" not in caplog.text


@pytest.mark.parametrize("norm", [0.01, 100.0])
def test_a_bound_on_the_gradient_shortens_the_step(comm, norm):
    """Oracle: the step without a bound, times the bound over the gradient's norm."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    loss, steps = functools.partial(F.cross_entropy, target=labels()), []
    gradient, _ = dense(model, x, loss)
    for bound in (None, norm):
        one = copy.deepcopy(model)
        take_step(trainer(comm, one), x, loss, max_norm=bound)
        steps.append(flat(one.parameters()) - flat(model.parameters()))
    scale = min(1.0, norm / gradient.norm().item())
    torch.testing.assert_close(steps[1], scale * steps[0], rtol=1e-4, atol=0)


def test_a_weight_of_examples_weighs_the_model(comm):
    """Oracle: a step without weights; of a single rank, any number of examples is all."""
    one, other = tanh_net().double(), tanh_net().double()
    other.load_state_dict(one.state_dict())
    x, loss = torch.randn(6, 4).double(), functools.partial(F.cross_entropy, target=labels())
    take_step(trainer(comm, one), x, loss)
    take_step(trainer(comm, other), x, loss, examples=6)
    assert torch.equal(flat(one.parameters()), flat(other.parameters()))


def test_a_layer_joins_later(comm):
    """Oracle: the layer stays in the step that takes the layer up, and has a last step later."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    model[0].requires_grad_(False)
    loss, kfac = functools.partial(F.cross_entropy, target=labels()), trainer(comm, model)
    take_step(kfac, x, loss)
    first = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    take_step(kfac, x, loss)  # takes the layer up
    assert torch.equal(model[0].weight, first)
    for _ in range(2):
        before = loss(model(x))
        take_step(kfac, x, loss)
        assert loss(model(x)) < before
    assert not torch.equal(model[0].weight, first)
    assert all("momentum_buffer" in kfac.optimizer.state[p] for p in model.parameters())


def test_a_scaled_loss_takes_the_same_step(comm):
    """Oracle: the step without a scale, a power of two; a step that overflows is no step."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    loss, other = functools.partial(F.cross_entropy, target=labels()), copy.deepcopy(model)
    take_step(trainer(comm, model), x, loss)
    kfac, scaler = trainer(comm, other), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = flat(other.parameters())
    for factor in (torch.inf, 1.0):
        kfac.optimizer.zero_grad()
        scaler.scale(factor * loss(other(x))).backward()
        kfac.grafting.set_batch(x, loss)
        kfac.step(scaler)
        assert torch.equal(flat(other.parameters()), before) == (factor == torch.inf)
    torch.testing.assert_close(flat(other.parameters()), flat(model.parameters()))


def test_a_layer_that_stays_has_no_part_in_the_model(comm):
    """Oracle: steps of a model in which the layer is frozen from the start."""
    one, other = tanh_net().double(), tanh_net().double()
    other.load_state_dict(one.state_dict())
    other[0].requires_grad_(False)
    x, loss = torch.randn(6, 4).double(), functools.partial(F.cross_entropy, target=labels())
    kfac = trainer(comm, one)
    one[0].weight.register_hook(lambda gradient: gradient * torch.nan)
    for trained in kfac, trainer(comm, other):
        take_step(trained, x, loss)
        take_step(trained, x, loss)
    torch.testing.assert_close(flat(one.parameters()), flat(other.parameters()))


def test_where_no_gradient_is_finite_nothing_moves(comm):
    """Oracle: the weights before."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    before, kfac = flat(model.parameters()), trainer(comm, model)
    take_step(kfac, x, lambda outputs: outputs.sum() * torch.nan)
    assert torch.equal(flat(model.parameters()), before)
    assert inside.predicted_change(kfac) == 0


def test_a_compiled_model_is_differentiated(comm):
    """Oracle: the step of the model that is not compiled."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    loss = functools.partial(F.cross_entropy, target=labels())
    for one in model, compiled:
        take_step(trainer(comm, one), x, loss)
    torch.testing.assert_close(flat(model.parameters()), flat(compiled.parameters()))


@pytest.mark.parametrize("factor", [-1.0, 0.01, 0.5, 2.0, 100.0])
def test_another_loss_is_warned_of_once(comm, caplog, factor):
    """Oracle: the factor; losses of a part of a batch differ less."""
    model, x = tanh_net().double(), torch.randn(6, 4).double()
    kfac = trainer(comm, model)
    for _ in range(2):
        kfac.optimizer.zero_grad()
        F.cross_entropy(model(x), labels()).backward()
        kfac.grafting.set_batch(x, lambda outputs: factor * F.cross_entropy(outputs, labels()))
        kfac.step()
    said = [r for r in caplog.records if "the loss that backward()" in r.getMessage()]
    assert len(said) == (factor not in (0.5, 2.0))
    for record in said:
        assert record.args[0] == pytest.approx(factor * record.args[1])


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ({"lr": 0.1}, "SGD(lr=0.1)"),
        ({"lr": 1.0, "momentum": 0.9}, "SGD(momentum=0.9)"),
        ({"lr": 1.0, "weight_decay": 1e-4}, "SGD(weight_decay=0.0001)"),
    ],
)
def test_an_optimizer_that_changes_the_step_is_refused(comm, numbers, shown):
    model = tanh_net()
    message = re.escape(f"optimizer={shown} must be SGD(lr=1, momentum=0, weight_decay=0)")
    with pytest.raises(ValueError, match=message):
        problem.kfac(model, torch.optim.SGD(model.parameters(), **numbers), comm, **QUADRATIC)


def test_other_optimizers_are_refused(comm):
    model = tanh_net()
    with pytest.raises(ValueError, match=r"optimizer=Adam\(\) must be SGD\(lr=1"):
        problem.kfac(model, torch.optim.Adam(model.parameters(), 1.0), comm, **QUADRATIC)


def test_a_changed_learning_rate_is_refused_at_the_step(comm):
    kfac = trainer(comm, tanh_net())
    kfac.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"SGD\(lr=0.5\) must be"):
        take_step(kfac, torch.randn(2, 4), lambda outputs: outputs.square().mean())


def test_each_step_needs_a_batch(comm):
    """Oracle: the line; a batch serves a single step."""
    kfac = trainer(comm, tanh_net())
    take_step(kfac, torch.randn(2, 4), lambda outputs: outputs.square().mean())
    with pytest.raises(ValueError, match=r"needs grafting.set_batch\(inputs, loss\) before step"):
        kfac.step()


def test_a_batch_needs_the_quadratic_model(comm):
    model = tanh_net()
    kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), lr=1.0), comm)
    with pytest.raises(ValueError, match=r"needs grafting=QuadraticModel\(\)"):
        kfac.grafting.set_batch(torch.ones(1, 4), torch.sum)


def test_outputs_have_to_be_a_tensor(comm):
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model = nn.Sequential(nn.Linear(4, 4), Pair(4, 3)).double()
    kfac = trainer(comm, model)
    x = torch.randn(2, 4).double()
    model(x)[0].sum().backward()
    with pytest.raises(ValueError, match="the model returns a tuple; .* needs a model"):
        kfac.grafting.set_batch(x, torch.sum)
        kfac.step()


def test_an_operator_without_a_forward_mode_is_named(comm):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    with pytest.raises(UserError, match="forward-mode derivatives: .*_rnn_layer that does not"):
        take_step(trainer(comm, Words()), torch.randn(2, 3, 4), lambda f: f.square().mean())


def test_the_caller_cannot_take_the_step(comm):
    with pytest.raises(
        ValueError, match=r"with grafting=QuadraticModel\(\), call grafting.set_batch"
    ):
        trainer(comm, tanh_net()).precondition()


@pytest.mark.parametrize("bound", ["kl_clip", "norm_clip"])
def test_a_second_length_is_refused(comm, bound):
    """Oracle: the line."""
    with pytest.raises(ValueError, match="grafting='quadratic-model' needs clip=None"):
        trainer(comm, tanh_net(), **{bound: 0.1})


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        (
            Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
            {},
            "grafting='quadratic-model' needs assignment.shard_optimizer=False",
        ),
        (
            Strategy(CommOpt(), transport=Transport(virtual_ranks=2)),
            {},
            "grafting='quadratic-model' needs transport.virtual_ranks=None",
        ),
        (
            None,
            {"relative_damping": True, "damping": 0.1},
            "grafting='quadratic-model' needs relative=False",
        ),
    ],
)
def test_choices_without_a_model_are_refused(comm, strategy, settings, message):
    model = tanh_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=message):
        problem.kfac(model, optimizer, comm, strategy, **(QUADRATIC | settings))
