"""The moments of many layers, computed together after a backward pass, as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from support import inside

COMM = mpikfac.world()


class Images(nn.Module):
    """Pairs of equal convolutions of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            lambda: nn.Conv2d(4, 4, 3, padding=1),
            lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False),
            lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
            lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
            lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            lambda: nn.Conv2d(4, 4, 1),
            lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
        ]
        self.layers = nn.ModuleList(kind() for kind in kinds for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.norms):
            x = x + layer(x).tanh()
        for layer in self.down:
            x = layer(x).tanh()
        return self.head(x.flatten(2).mean(2))


class Words(nn.Module):
    """Pairs of equal layers of words; a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(2))
        self.tokens = nn.ModuleList(nn.Linear(4, 4, bias=bias) for bias in (True, True, False))
        self.cells = nn.ModuleList(nn.GRUCell(4, 4) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.tokens[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for attention in self.attentions:
            words = h.transpose(0, 1)
            h = h + attention(words, words, words)[0].transpose(0, 1)
        for layer in (*self.tokens, *self.norms, self.tokens[0]):
            h = h + layer(h).tanh()
        state = h.mean(1)
        for cell in self.cells:
            state = cell(h[:, 0], state)
        return self.head(state)


def images(seed: int, count: int = 6) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, 7, 7, generator=made, dtype=torch.float64)


def words(seed: int, count: int = 6) -> Tensor:
    return torch.randint(7, (count, 5), generator=torch.Generator().manual_seed(seed))


def rows(seed: int) -> Tensor:
    return images(seed)[..., 0, 0]


MODELS = {"images": (Images, images), "words": (Words, words)}
RULES = {
    "plain": lambda layer: layer,
    "reduce": lambda layer: replace(layer, kfac_approx="reduce"),
    "blocks": lambda layer: replace(layer, largest=3),
    "diagonals": lambda layer: layer if layer.diagonal else replace(layer, diagonal=layer.sides),
}


def trainer(monkeypatch, way, model, **settings) -> mpikfac.KFAC:
    """Return a trainer that computes moments in a way."""
    inside.record(monkeypatch, way)
    coverage = settings.pop("coverage", mpikfac.Coverage())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # directions enlarge rounding
    intervals = {"factor_update_steps": 1, "inv_update_steps": 1}
    return mpikfac.KFAC(model, optimizer, COMM, coverage=coverage, **intervals, **settings)


def learn(kfac: mpikfac.KFAC, batches: list[Tensor]) -> None:
    """Take a step with micro-batches."""
    kfac.optimizer.zero_grad()
    for x in batches:
        outputs = kfac.model(x)
        kfac.record(outputs)
        F.cross_entropy(outputs, torch.arange(len(x)) % 3).div(len(batches)).backward()
    kfac.step()


def both(monkeypatch, model, **settings) -> list[mpikfac.KFAC]:
    """Return trainers of equal models: moments at once, and together."""
    trainers = []
    for way in inside.MOMENTS:
        torch.manual_seed(0)
        trainers.append(trainer(monkeypatch, way, model().double(), **settings))
    return trainers


def assert_alike(at_once: mpikfac.KFAC, found: mpikfac.KFAC) -> None:
    expected = inside.factors(at_once)
    for name, average in inside.factors(found).items():
        torch.testing.assert_close(average, expected[name], rtol=1e-10, atol=1e-13, msg=name)


def run(trainers: list[mpikfac.KFAC], make, micro: int = 1, steps: int = 2) -> None:
    for kfac in trainers:
        torch.manual_seed(1)
        for step in range(steps):
            learn(kfac, list(make(step).chunk(micro)))


@pytest.mark.parametrize(
    ("preconditioner", "rule"),
    [
        ("ekfac", "plain"),
        *((preconditioner, rule) for preconditioner in ("inverse", "eva") for rule in RULES),
    ],
)
@pytest.mark.parametrize("kind", MODELS)
def test_moments_together_are_those_at_once(kind, preconditioner, rule, monkeypatch):
    """Oracle: moments of call after call, in float64; all kinds of layers in equal pairs."""
    model, make = MODELS[kind]
    norms = {**mpikfac.KINDS, **(mpikfac.NORMS if rule == "plain" else {})}
    coverage = mpikfac.Coverage(covers=norms, rule=RULES[rule])
    trainers = both(monkeypatch, model, preconditioner=preconditioner, coverage=coverage)
    run(trainers, make)
    assert_alike(*trainers)
    if preconditioner == "ekfac":
        torch.testing.assert_close(*(dict(inside.scales(kfac)) for kfac in trainers))


ESTIMATORS = {
    "mc": {"fisher_type": "mc", "mc_samples": 2},
    "forward-only": {"fisher_type": "forward-only"},
    "every third": {"subsample": 3},
    "kfac-pytorch": {"normalization": "kfac-pytorch"},
    "identity": {"initial_factor": "identity"},
}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_estimator_takes_moments_together(kind, estimator, micro, monkeypatch):
    """Oracle: moments of call after call, in float64; also of micro-batches."""
    model, make = MODELS[kind]
    choices = mpikfac.Estimator(**ESTIMATORS[estimator])
    trainers = both(monkeypatch, model, estimator=choices)
    run(trainers, make, micro)
    assert_alike(*trainers)


def sums_of_stacks(monkeypatch, kfac: mpikfac.KFAC) -> list[list[int]]:
    """Return the addresses of the sums of each stack of a backward pass."""
    right, stacks = torch._foreach_add_, []

    def noted(totals: list[Tensor], added: list[Tensor]) -> None:
        stacks.append([total.data_ptr() for total in totals])
        right(totals, added)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_add_", noted)
        F.cross_entropy(kfac.model(words(0)), torch.arange(6) % 3).backward()
    return stacks


def test_a_stack_adds_to_a_sum_once(monkeypatch):
    """Oracle: addresses of sums; a GPU would add twice at once. A layer is called twice."""
    _, kfac = both(monkeypatch, Words)
    stacks = sums_of_stacks(monkeypatch, kfac)
    assert stacks and all(len(stack) == len(set(stack)) for stack in stacks)


def test_few_bytes_may_wait(monkeypatch):
    """Oracle: moments of call after call; with no byte to wait, there are no stacks."""
    inside.let_wait(monkeypatch, 0)
    trainers = both(monkeypatch, Words)
    assert sums_of_stacks(monkeypatch, trainers[1]) == []
    trainers[1].clear_statistics()
    run(trainers, words)
    assert_alike(*trainers)


def test_equal_layers_with_other_weights_in_sums_stay_apart(monkeypatch):
    """Oracle: moments of call after call; one of two equal layers sees a part of the batch."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.whole, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat([self.part(x[:3]).tanh(), x[3:6]])
            return self.head(torch.cat([self.whole(half).tanh() for half in h.chunk(2)]))

    trainers = both(monkeypatch, Parts, coverage=mpikfac.Coverage(part_of_batch=("part",)))
    run(trainers, rows)
    assert_alike(*trainers)


def test_layers_of_derived_classes_stay_alone(monkeypatch):
    """Oracle: moments of call after call; each layer multiplies by a number of its own."""

    class Scaled(nn.Linear):
        def __init__(self, scale: float) -> None:
            super().__init__(4, 4)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.scale * x)

    class ScaledLayer(mpikfac.Layer):
        def inputs(self, x: Tensor) -> Tensor:
            return super().inputs(self.module.scale * x)

    def model() -> nn.Module:
        return nn.Sequential(Scaled(2.0), nn.Tanh(), Scaled(3.0), nn.Tanh(), nn.Linear(4, 3))

    coverage = mpikfac.Coverage(covers={**mpikfac.KINDS, Scaled: ScaledLayer})
    trainers = both(monkeypatch, model, coverage=coverage)
    run(trainers, rows)
    assert_alike(*trainers)


# -- tensors that change, and passes that end early ------------------------------------------------


class Undone(torch.autograd.Function):
    """Change the output in the backward pass, as functions do that restore their input there."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.result = x.tanh()
        return ctx.result

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        slope = 1 - ctx.result.square()
        ctx.result.zero_()
        return g * slope


class Network(nn.Module):
    def __init__(self, undone: bool = False, stops: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.undone, self.stops = undone, stops

    def forward(self, x: Tensor) -> Tensor:
        h = Undone.apply(self.first(x)) if self.undone else self.first(x).tanh()
        if self.stops:
            h.register_hook(self.stop)
        return self.second(h)

    def stop(self, g: Tensor) -> None:
        self.stops = False
        raise KeyboardInterrupt


def test_an_input_that_changes_inside_the_backward_pass_is_refused_by_name(monkeypatch):
    """Oracle: the line."""
    _, kfac = both(monkeypatch, lambda: Network(undone=True))
    line = (
        "layer 'second': the input, or the gradient of the output, was changed in place .* the end"
    )
    with pytest.raises(RuntimeError, match=line):
        learn(kfac, [rows(0)])


def test_after_the_backward_pass_inputs_may_change(monkeypatch):
    """Oracle: moments at once; programs load the next batch into the same memory."""
    trainers = both(monkeypatch, Network)
    for kfac in trainers:
        x = rows(0)
        F.cross_entropy(kfac.model(x), torch.arange(len(x)) % 3).backward()
        x.copy_(rows(1))
        kfac.step()
    assert_alike(*trainers)


@pytest.mark.parametrize("discards", [True, False])
def test_a_backward_pass_that_is_interrupted_leaves_no_call(discards, monkeypatch, caplog):
    """Oracle: an undisturbed run, or the warning and the moments at once."""
    trainers = both(monkeypatch, lambda: Network(stops=True))
    for kfac in trainers:
        with pytest.raises(KeyboardInterrupt):
            learn(kfac, [rows(0)])
        kfac.clear_statistics() if discards else None
        learn(kfac, [rows(1)])
        learn(kfac, [rows(2)])
        assert inside.waiting(kfac) == 0
    assert_alike(*trainers)
    assert ("was interrupted" in caplog.text) != discards
