"""Which passes and gradients count: statistics belong to the gradient of the weight."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpikfac
from mpikfac import KFAC
from support import inside

COMM = mpikfac.world()
Hook = Callable[[Tensor], Tensor | None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(seed: int = 0, shape: tuple[int, ...] = (8, 4)) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=made, dtype=torch.float64)
    return x, torch.randint(3, shape[:1], generator=made)


def trainer(model: nn.Module, **settings) -> KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return KFAC(model, optimizer, COMM, damping=0.03, **settings)


def averages(kfac: KFAC) -> list[Tensor]:
    return [average.clone() for average in inside.factors(kfac).values()]


def learned(model, x, y):
    """Return a trainer with the statistics of a batch."""
    model(x)
    kfac = trainer(model)
    F.cross_entropy(model(x), y).backward()
    kfac.precondition()
    return kfac


def assert_alike(kfac: KFAC, expected: KFAC) -> None:
    for mine, theirs in zip(averages(kfac), averages(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


# -- where a pass begins ---------------------------------------------------------------------------


def whole(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def parts(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[2](model[1](model[0](x)))


def validate(kfac: KFAC) -> None:
    kfac.model.eval()
    kfac.model(batch(9)[0])
    kfac.model.train()


def predict(kfac: KFAC) -> None:
    with torch.no_grad():
        kfac.model(batch(9)[0])


def pause(kfac: KFAC) -> None:
    with kfac.no_recording():
        kfac.model(batch(9)[0]).sum().backward()


def copied(kfac: KFAC) -> None:
    copy.deepcopy(kfac.model)(batch(9)[0]).sum().backward()


def drop(kfac: KFAC) -> None:
    kfac.model(batch(9)[0])


@pytest.mark.parametrize("other", [validate, predict, pause, copied, drop])
@pytest.mark.parametrize("when", [0, 2, 4])
@pytest.mark.parametrize("by_model", [(), (0, 3)])
def test_micro_batches_are_told_apart_whatever_came_before(other, when, by_model):
    """Oracle: the joined batch in one pass; some micro-batches go through the model's parts."""
    kfac, expected = trainer(network()), trainer(network())
    x, y = batch(1, (16, 4))
    for _ in range(2):
        for number, (inputs, labels) in enumerate(zip(x.chunk(4), y.chunk(4))):
            if number == when:
                other(kfac)
                kfac.optimizer.zero_grad() if when == 0 else None
            outputs = (whole if number in by_model else parts)(kfac.model, inputs)
            F.cross_entropy(outputs, labels).div(4).backward()
        if when == 4:
            other(kfac)
        F.cross_entropy(expected.model(x), y).backward()
        for each in (kfac, expected):
            each.precondition()
            each.optimizer.zero_grad()
    assert_alike(kfac, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_of_two_recomputed_parts_sees_one_batch(reentrant):
    """Oracle: the same calls without recomputation."""
    found = []
    for again in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        kfac = trainer(model)
        x, y = batch()
        for _ in range(3):
            h = x.clone().requires_grad_()
            for _ in range(2):
                half = model[:2]
                h = checkpoint(half, h, use_reentrant=reentrant) if again else half(h)
            F.cross_entropy(model[2](h), y).backward()
            kfac.precondition()
        found.append(kfac)
    assert_alike(*found)


# -- which gradient --------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Change the gradient as the hook does, by a module of its own."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        hook = self.hook

        class Changed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx, g: Tensor) -> Tensor:
                changed = hook(g)
                return g if changed is None else changed

        return Changed.apply(x)


class Between(nn.Module):
    """A layer, something between, and a head."""

    def __init__(self, layer: nn.Module, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.between, self.head = layer, between, nn.LazyLinear(3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.layer(x)).tanh().flatten(1))


def times(g: Tensor) -> Tensor:
    return 0.1 * g


def reverse(g: Tensor) -> Tensor:
    return -3 * g


def clamp(g: Tensor) -> Tensor:
    return g.clamp(-1e-3, 1e-3)


def mask(g: Tensor) -> Tensor:
    return torch.where(torch.arange(g.shape[-1]) % 2 == 0, g, 0)


def look(g: Tensor) -> None:
    assert g.isfinite().all()


def on_tensor(hook: Hook) -> Callable[[Tensor], Tensor]:
    def register(h: Tensor) -> Tensor:
        h.retain_grad()
        h.register_hook(hook)
        return h

    return register


WATCHED = {
    "linear": (lambda: nn.Linear(4, 6), (8, 4)),
    "tokens": (lambda: nn.Linear(4, 6), (8, 2, 4)),
    "convolution": (lambda: nn.Conv1d(2, 3, 2), (8, 2, 4)),
    "embedding": (lambda: nn.Embedding(5, 3), (8, 4)),
}


@pytest.mark.parametrize("hook", [times, reverse, clamp, mask, look])
@pytest.mark.parametrize(
    ("kind", "place"), [*((kind, "forward") for kind in WATCHED), ("linear", "hook of the module")]
)
def test_hooks_on_an_output_change_the_gradient_before_it_counts(hook, kind, place):
    """Oracle: a module behind the layer that changes the gradient in the same way."""
    make, shape = WATCHED[kind]
    x, y = batch(shape=shape)
    x = x.abs().long().clamp(max=4) if kind == "embedding" else x
    found = []
    for between in (on_tensor(hook), Hooked(hook)):
        torch.manual_seed(0)
        by_module = place != "forward" and not isinstance(between, Hooked)
        model = Between(make().double(), nn.Identity() if by_module else between)
        if by_module:
            model.layer.register_forward_hook(lambda module, inputs, h, b=between: b(h))
        found.append(learned(model, x, y))
    assert_alike(*found)


@pytest.mark.parametrize("shape", [(8, 2, 4), (8, 2, 3, 4)])
def test_an_operation_in_place_behind_tokens_hides_no_layer(shape):
    """Oracle: the same operation out of place; the output is a view of the product."""
    x, y = batch(shape=shape)
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = Between(nn.Linear(4, 6).double(), nn.ReLU(in_place))
        found.append(learned(model, x, y))
    assert_alike(*found)


# -- passes without a gradient of a parameter ------------------------------------------------------


def attack(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward(inputs=[x])


def saliency(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(model(x).max(1).values.sum(), [x])


def inner(model: nn.Module, x: Tensor, y: Tensor) -> None:
    hidden = model[0](x)
    torch.autograd.grad(model[2](model[1](hidden)).sum(), [hidden])


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(model(x).sum(), [x], create_graph=True)


def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    for _ in range(2):
        loss.backward(retain_graph=True, inputs=[x])


def transformed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)


@pytest.mark.parametrize("other", [attack, saliency, inner, penalty, twice, transformed])
@pytest.mark.parametrize("preconditioner", ["inverse", "eva", "ekfac"])
def test_a_pass_without_a_gradient_of_a_parameter_is_not_recorded(other, preconditioner):
    """Oracle: the same steps without the pass, to the last bit."""
    kfac, expected = (trainer(network(), preconditioner=preconditioner) for _ in range(2))
    for step in range(2):
        x, y = batch(step + 5)
        other(kfac.model, x.requires_grad_(), y)
        for each in (kfac, expected):
            x, y = batch(step)
            F.cross_entropy(each.model(x), y).backward()
            each.precondition()
            each.optimizer.zero_grad()
    assert all(map(torch.equal, averages(kfac), averages(expected)))


def by_backward(loss: Tensor, model: nn.Module) -> None:
    loss.backward(inputs=list(model.parameters()))


def by_grad(loss: Tensor, model: nn.Module) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient


def after_an_attack(loss: Tensor, model: nn.Module) -> None:
    loss.backward(inputs=[model.x], retain_graph=True)
    loss.backward(inputs=list(model.parameters()))


@pytest.mark.parametrize("differentiate", [by_backward, by_grad, after_an_attack])
def test_gradients_of_parameters_count_in_whatever_way_they_are_made(differentiate):
    """Oracle: `backward()` of the loss, to the last bit."""
    kfac, expected = trainer(network()), trainer(network())
    x, y = batch()
    kfac.model.x = x.clone().requires_grad_()
    differentiate(F.cross_entropy(kfac.model(kfac.model.x), y), kfac.model)
    F.cross_entropy(expected.model(x), y).backward()
    for each in (kfac, expected):
        each.precondition()
    assert all(map(torch.equal, averages(kfac), averages(expected)))


def test_a_pass_counts_for_the_layers_whose_gradients_it_makes():
    """Oracle: by layer, two passes, and the second pass alone."""
    kfac, both, second = (trainer(network()) for _ in range(3))
    for each, passes in ((kfac, (0, 1)), (both, (0, 1)), (second, (1,))):
        for seed in passes:
            x, y = batch(seed)
            only = [each.model[2].weight] if each is kfac and seed == 0 else None
            F.cross_entropy(each.model(x), y).backward(inputs=only)
        each.precondition()
    for name, average in inside.factors(kfac).items():
        expected = second if name.startswith("0") else both
        torch.testing.assert_close(average, inside.factors(expected)[name])


def test_labels_of_the_model_count_also_behind_other_passes():
    """Oracle: the same without the passes; `record` runs passes of its own."""
    estimator = mpikfac.Estimator(fisher_type="type-2")
    kfac, expected = (trainer(network(), estimator=estimator) for _ in range(2))
    attack(kfac.model, batch(4)[0].requires_grad_(), batch(4)[1])
    for each in (kfac, expected):
        x, y = batch()
        outputs = each.model(x.requires_grad_())
        if each is kfac:
            torch.autograd.grad(outputs.sum(), [x], retain_graph=True)
        each.record(outputs)
        F.cross_entropy(outputs, y).backward()
        each.precondition()
    assert_alike(kfac, expected)


def test_a_gradient_penalty_adds_the_gradient_at_outputs_alone():
    """Oracle: G of the whole loss's gradient at the layer's output, by autograd.

    The weight's gradient has a further part, which comes through the first backward pass.
    """
    kfac = trainer(network())
    model, (x, y) = kfac.model, batch()
    hidden = model[0](x.requires_grad_())
    loss = F.cross_entropy(model[2](model[1](hidden)), y)
    (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
    hidden.retain_grad()
    (loss + slope.square().sum()).backward()
    kfac.precondition()
    expected = len(x) * hidden.grad.T @ hidden.grad
    found = mpikfac.numerics.unfold_triangle(inside.factors(kfac)["0.G"])
    torch.testing.assert_close(found, expected)
    gradient = inside.gradients(kfac)["0"].view(6, 5)[:, :4]
    assert not torch.allclose(gradient, hidden.grad.T @ x)


# -- inputs that change behind a call --------------------------------------------------------------


class Residual(nn.Module):
    """An attention, or a cell, whose result is added to its own input in place or out of place."""

    def __init__(self, kind: str, in_place: bool) -> None:
        super().__init__()
        self.kind, self.in_place = kind, in_place
        makes = {"attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True)}
        makes |= {"gru": lambda: nn.GRUCell(6, 6), "rnn": lambda: nn.RNNCell(6, 6)}
        makes |= {"linear": lambda: nn.Linear(6, 6)}
        self.inner, self.head = makes[kind](), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone() if self.kind == "attention" else x[:, 0].clone()
        result = self.inner(h, h, h)[0] if self.kind == "attention" else self.inner(h)
        h = h.add_(result) if self.in_place else h + result
        return self.head(h.flatten(1, -2).mean(1) if h.dim() > 2 else h)


@pytest.mark.parametrize("kind", ["attention", "gru", "rnn", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_inputs_may_change_in_place(kind, dtype):
    """Oracle: the same sum out of place, to the last bit."""
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        kfac = trainer(Residual(kind, in_place))
        x = torch.randn(5, 3, 6)
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(kfac.model(x), torch.tensor([0, 1, 2, 0, 1]))
        loss.backward()
        kfac.precondition()
        found.append(averages(kfac))
    assert all(map(torch.equal, *found))


class Halved(nn.Linear):
    """Keep half of the input for the backward pass, and not the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2)


class HalvedLayer(mpikfac.Layer):
    def inputs(self, x: Tensor) -> Tensor:
        return super().inputs(x / 2)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_an_input_that_changes_before_backward_is_refused_by_name(trained):
    """Oracle: the line; a bias alone needs no input. Autograd itself finds no mistake here."""
    model = nn.Sequential(Halved(4, 3)).double()
    model[0].weight.requires_grad_(trained == "weight")
    kinds = {**mpikfac.KINDS, Halved: HalvedLayer}
    kfac = trainer(model, coverage=mpikfac.Coverage(covers=kinds))
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    x.mul_(3)
    if trained == "bias":
        loss.backward()
        kfac.step()
        return
    with pytest.raises(RuntimeError, match="layer '0': the input was changed in place after the"):
        loss.backward()


# -- layouts of inputs -----------------------------------------------------------------------------

SPARSE = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("preconditioner", ["inverse", "eva", "ekfac"])
def test_sparse_inputs_count_as_dense_inputs(layout, preconditioner):
    """Oracle: the same inputs, dense."""
    x, y = batch()
    found = []
    for inputs in (SPARSE[layout](x.where(x > 0, 0)), x.where(x > 0, 0)):
        kfac = trainer(network(), preconditioner=preconditioner)
        for _ in range(2):
            F.cross_entropy(kfac.model(inputs), y).backward()
            kfac.precondition()
            kfac.optimizer.zero_grad()
        found.append(kfac)
    assert_alike(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged), "a nested"),
        (lambda x: torch.nested.nested_tensor([x[:3], x[3:]]), "a nested tensor"),
        (lambda x: x.to_mkldnn(), "in the layout of oneDNN"),
    ],
)
def test_other_layouts_are_refused_by_name(make, told):
    """Oracle: the line; a skipped layer takes every layout."""
    for skip in ((), ("0",)):
        model = network().float()
        kfac = trainer(model, coverage=mpikfac.Coverage(skip))
        x = make(batch()[0].float())
        if skip:
            model[0](x)
            continue
        with pytest.raises(TypeError, match=f"layer '0': the input is {told}.*skip=.'0'"):
            kfac.model(x)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_indices_of_32_bits_count_as_those_of_64(sharing):
    """Oracle: the same indices in 64 bits."""
    coverage = mpikfac.Coverage(rule=lambda layer: dataclasses.replace(layer, kfac_approx=sharing))
    found = []
    for dtype in (torch.int32, torch.int64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 3)).double()
        kfac = trainer(model, coverage=coverage)
        x, y = batch()
        F.cross_entropy(model(x.abs().clamp(max=4).to(dtype)), y).backward()
        kfac.precondition()
        found.append(kfac)
    assert_alike(*found)
