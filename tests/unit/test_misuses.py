"""Uses that break other implementations or silently go wrong: mpikfac works or raises an error.

Most uses have a plain way to write the same computation. The plain way is the oracle.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from support import inside, problem

SETTINGS = {"damping": 0.1, "inv_update_steps": 2, "preconditioner": "eigen", "kl_clip": None}
CHANNELS, SIZE, CLASSES = 4, 6, 3


class Network(nn.Module):
    """Given layers, before a head that is always the same."""

    def __init__(self, *front):
        super().__init__()
        self.front = nn.Sequential(*front)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.front(x)).flatten(2).mean(2))


class Halves(nn.Module):
    """A convolution of two groups, as two convolutions."""

    def __init__(self, whole):
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(2, 2, 3) for _ in range(2))
        for part, weight, bias in zip(self.parts, whole.weight.chunk(2), whole.bias.chunk(2)):
            part.weight.data, part.bias.data = weight.detach().clone(), bias.detach().clone()

    def forward(self, x):
        return torch.cat([part(half) for part, half in zip(self.parts, x.chunk(2, 1))], 1)


class Twice(nn.Module):
    """A module used at two places, or two modules that share all parameters."""

    def __init__(self, apart):
        super().__init__()
        self.first = conv(3, padding=1)
        self.second = conv(3, padding=1) if apart else self.first
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.second(torch.relu_(self.first(x)))


def conv(kernel=3, **choices):
    torch.manual_seed(1)
    return nn.Conv2d(CHANNELS, CHANNELS, kernel, **choices)


def frozen_bias():
    module = conv()
    module.bias.data.zero_()
    module.bias.requires_grad_(False)
    return module


def with_unused(front):
    model = Network(front)
    model.unused = nn.Linear(3, 3)
    return model


def as_rows():
    """Return a transposed 1x1 convolution and the same computation as a plain convolution."""
    transposed = nn.ConvTranspose2d(CHANNELS, CHANNELS, 1)
    plain = conv(1)
    transposed.weight.data = plain.weight.detach().transpose(0, 1).clone()
    transposed.bias.data = plain.bias.detach().clone()
    return transposed, plain


class OneHot(nn.Module):
    """An embedding as a linear layer."""

    def __init__(self, embedding):
        super().__init__()
        entries, width = embedding.weight.shape
        self.linear = nn.Linear(entries, width, bias=False)
        self.linear.weight.data = embedding.weight.detach().T.clone()

    def forward(self, x):
        return self.linear(F.one_hot(x, self.linear.in_features).double())


class Tokens(nn.Module):
    """Vectors of a channel's positive positions."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return self.embedding((x[:, 0] > 0).long()).movedim(-1, 1)


def embedding():
    torch.manual_seed(1)
    return nn.Embedding(2, CHANNELS)


def hooked():
    """Return a convolution with a hook that replaces the output."""
    module = conv()
    module.register_forward_hook(lambda module, given, output: 3 * torch.sin(output))
    return module


class Sine(nn.Module):
    """The computation of the hook."""

    def forward(self, x):
        return 3 * torch.sin(x)


PAIRS = {
    "groups": lambda: (Network(conv(groups=2)), Network(Halves(conv(groups=2)))),
    "padding='same'": lambda: (Network(conv(padding="same")), Network(conv(padding=1))),
    "circular padding": lambda: (
        Network(conv(padding=1, padding_mode="circular")),
        Network(nn.CircularPad2d(1), conv()),
    ),
    "an in-place activation": lambda: (
        Network(conv(), nn.ReLU(inplace=True)),
        Network(conv(), nn.ReLU()),
    ),
    "a hook that replaces the output": lambda: (Network(hooked()), Network(conv(), Sine())),
    "channels last": lambda: (
        Network(conv()).to(memory_format=torch.channels_last),
        Network(conv()),
    ),
    "a frozen bias": lambda: (Network(frozen_bias()), Network(conv(bias=False))),
    "an unused layer": lambda: (with_unused(conv()), Network(conv())),
    "a module called twice": lambda: (Network(Twice(False)), Network(Twice(True))),
    "a transposed convolution": lambda: tuple(Network(module) for module in as_rows()),
    "an embedding": lambda: (
        Network(Tokens(embedding())),
        Network(Tokens(OneHot(embedding()))),
    ),
    "a copied model": lambda: (copy.deepcopy(Network(conv())), Network(conv())),
    "a pickled model": lambda: (pickle.loads(pickle.dumps(Network(conv()))), Network(conv())),
}


def network():
    return PAIRS["an in-place activation"]()[0]


def batch(step, examples=8):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(examples, CHANNELS, SIZE, SIZE, generator=generator).double()
    return x, torch.randint(CLASSES, (examples,), generator=generator)


def make(comm, model, wrapped=lambda model: model, **settings):
    """Return K-FAC of the model; the head starts with the same weights behind any layers."""
    torch.manual_seed(2)
    for parameter in model.head.parameters():
        nn.init.normal_(parameter)
    model = wrapped(model.double())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1, 0.9)
    return problem.kfac(model, optimizer, comm, **{**SETTINGS, **settings})


def learn(kfac, x, y):
    F.cross_entropy(kfac.model(x), y).backward()


def train(kfac, steps=range(4), before=None):
    """Train, and return outputs for a batch outside training."""
    for step in steps:
        kfac.optimizer.zero_grad()
        if before:
            before(kfac)
        learn(kfac, *batch(step))
        kfac.step()
    with torch.no_grad():
        return kfac.model(batch(99)[0])


@pytest.mark.parametrize("name", PAIRS)
def test_it_works_as_its_plain_form(comm, name):
    """Oracle: the same computation in plain layers."""
    found, expected = (train(make(comm, model)) for model in PAIRS[name]())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def no_grad(kfac):
    with torch.no_grad():
        kfac.model(batch(50)[0])


def evaluation(kfac):
    kfac.model.eval()
    learn(kfac, *batch(50))
    kfac.optimizer.zero_grad()
    kfac.model.train()


@pytest.mark.parametrize("before", [no_grad, evaluation])
def test_other_passes_before_a_step_leave_no_trace(comm, before):
    """Oracle: training without the passes, to the last bit."""
    found, expected = (train(make(comm, network()), before=b) for b in (before, None))
    assert torch.equal(found, expected)


def test_micro_batches_are_the_batch(comm):
    """Oracle: the batch at once."""
    whole, parts = (make(comm, network()) for _ in range(2))
    for step in range(3):
        for kfac, count in ((whole, 1), (parts, 4)):
            kfac.optimizer.zero_grad()
            for x, y in zip(*(part.chunk(count) for part in batch(step))):
                (F.cross_entropy(kfac.model(x), y) / count).backward()
            kfac.step()
    torch.testing.assert_close(train(parts, []), train(whole, []))


def test_a_smaller_last_batch_weighs_less(comm):
    """Oracle: the factors of all examples at once, every example with equal weight."""
    split, joined = (
        make(comm, network(), factor_decay=0.5, factor_update_steps=1) for _ in range(2)
    )
    x, y = batch(0, examples=9)
    for some in (slice(0, 6), slice(6, 9)):
        learn(split, x[some], y[some])
        split.precondition()  # weights stay
    counts = torch.tensor([0.5] * 6 + [1.0] * 3).double()
    assert inside.weights(split)["head.A"] == 0.5 * counts.sum()
    a = joined.model.front(x).tanh().flatten(2).mean(2).detach()
    a = torch.cat([a, a.new_ones(9, 1)], 1)
    expected = (a.T * counts) @ a / counts.sum()
    found = mpikfac.numerics.unfold_triangle(inside.factors(split)["head.A"])
    torch.testing.assert_close(found, expected)


def test_numbers_that_are_not_finite_change_nothing(comm):
    """Oracle: training without the batch, except for the batch's number."""
    kfac = make(comm, network())
    train(kfac, range(2))
    before = [p.detach().clone() for p in kfac.model.parameters()]
    averages = inside.factors(kfac).flat.clone()
    x, y = batch(2)
    kfac.optimizer.zero_grad()
    learn(kfac, x * math.nan, y)
    kfac.step()
    assert all(torch.equal(p, old) for p, old in zip(kfac.model.parameters(), before))
    assert torch.equal(inside.factors(kfac).flat, averages)


def test_a_run_goes_on_between_two_decompositions(comm):
    """Oracle: the uninterrupted run, to the last bit."""
    first, second = (make(comm, network()) for _ in range(2))
    train(first, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(train(second, range(3, 6)), train(first, range(3, 6)))


def test_the_state_of_another_model_is_refused_and_changes_nothing(comm):
    kfac, other = make(comm, network()), make(comm, Network(conv(5), nn.ReLU()))
    train(kfac)
    train(other)
    before = [p.detach().clone() for p in kfac.model.parameters()]
    with pytest.raises(mpikfac.UserError, match=r"item 'model/front.0.weight' must be float64"):
        kfac.load_state_dict(other.state_dict())
    assert all(torch.equal(p, old) for p, old in zip(kfac.model.parameters(), before))


def test_a_schedule_does_not_compound(comm):
    """Oracle: damping by hand: halved at two steps, for any calls in between."""
    damping = mpikfac.schedule.step_decay(0.4, at=[2, 4], factor=0.5)
    kfac = make(comm, network(), damping=damping)
    assert [inside.damping(kfac, step) for step in (0, 2, 3, 4, 4, 9)] == [
        *(0.4, 0.2, 0.2, 0.1, 0.1, 0.1),
    ]


def test_a_damping_that_falls_to_0_is_refused_at_that_step(comm):
    kfac = make(comm, network(), damping=mpikfac.schedule.linear(0.1, 0.0, 2))
    with pytest.raises(ValueError, match=r"damping=0.0 at step 2 must be positive"):
        train(kfac)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_like_a_plain_one(comm, backend):
    """Oracle: the same model without compilation."""
    torch.compiler.reset()
    compiled = make(comm, network(), lambda model: torch.compile(model, backend=backend))
    torch.testing.assert_close(train(compiled), train(make(comm, network())))


def test_a_model_that_ddp_has_averaged_is_preconditioned(comm, tmp_path):
    """Oracle: the plain model's step."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        kfac = make(comm, network(), nn.parallel.DistributedDataParallel)
        learn(kfac, *batch(0))
        kfac.precondition()
        kfac.optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(train(kfac, []), train(make(comm, network()), [0]))


def test_models_in_half_precision_are_refused_by_name(comm):
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"front.0 is torch.float16; trained parameters must be"):
        mpikfac.KFAC(model, optimizer, comm)
