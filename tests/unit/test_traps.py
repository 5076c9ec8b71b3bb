"""What K-FAC cannot compute correctly raises an error or one warning that names it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

import mpikfac
from mpikfac import (
    KFAC,
    AdamGrafting,
    Coverage,
    Estimator,
    FirstOrderTrainer,
    FisherClip,
    KLClip,
    NoGrafting,
    NormClip,
    Strategy,
    Transport,
    UserError,
)
from support import inside, problem

COMM = mpikfac.world()
EXAMPLES = 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(count: int = EXAMPLES, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=made, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=made)


def trainer(model: nn.Module, **settings) -> KFAC:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return KFAC(model, optimizer, COMM, damping=0.01, **settings)


def learn(kfac: KFAC, model: nn.Module | None = None, seed: int = 0) -> None:
    x, y = batch(seed=seed)
    kfac.optimizer.zero_grad()
    F.cross_entropy((model or kfac.model)(x), y).backward()
    kfac.step()


def averages(kfac: KFAC) -> list[torch.Tensor]:
    return [average.clone() for average in inside.factors(kfac).values()]


# -- layers and passes that K-FAC does not see -----------------------------------------------------


class Elsewhere(nn.Module):
    """A linear layer whose weight is used without a call of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.linear(x, self.first.weight, self.first.bias).tanh())


@pytest.mark.parametrize("way", ["called elsewhere", "eval"])
def test_a_layer_with_a_gradient_and_no_statistics_is_named_once(way, caplog):
    """Oracle: the log; a layer without a gradient is not named."""
    model = Elsewhere().double() if way == "called elsewhere" else network()
    name = "first" if way == "called elsewhere" else "0"
    if way == "eval":
        model[0].eval()
    kfac = trainer(model)
    for seed in range(2):
        learn(kfac, seed=seed)
    told = [r.getMessage() for r in caplog.records if "recorded no call" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"layer {name!r} has a gradient")


def test_a_pass_through_frozen_layers_is_not_recorded():
    """Oracle: averages of a trainer without the pass; a generator's pass by a discriminator."""
    expected, kfac = (trainer(network()) for _ in range(2))
    model, (x, y) = kfac.model, batch(seed=1)
    model.requires_grad_(False)
    F.cross_entropy(model(x.requires_grad_()), y).backward()
    model.requires_grad_(True)
    for one in (expected, kfac):
        learn(one)
    for mine, theirs in zip(averages(kfac), averages(expected)):
        torch.testing.assert_close(mine, theirs)


def test_a_paused_pass_is_not_recorded():
    """Oracle: averages of a trainer without the pass; SAM's first pass."""
    expected, kfac = (trainer(network()) for _ in range(2))
    x, y = batch(seed=1)
    with kfac.no_recording():
        F.cross_entropy(kfac.model(x), y).backward()
    for one in (expected, kfac):
        learn(one)
    for mine, theirs in zip(averages(kfac), averages(expected)):
        torch.testing.assert_close(mine, theirs)


def test_a_pause_within_a_pause_does_not_end_the_pause():
    """Oracle: averages of the batch alone."""
    kfac, expected = trainer(network()), trainer(network())
    x, y = batch(seed=1)
    with kfac.no_recording():
        with kfac.no_recording():
            pass
        F.cross_entropy(kfac.model(x), y).backward()
    for one in (kfac, expected):
        learn(one)
    assert all(map(torch.equal, averages(kfac), averages(expected)))


def test_passes_of_parts_of_the_model_are_told_apart():
    """Oracle: averages with calls of the model itself; two micro-batches, as a wrapper has them."""
    found = []
    for through in (True, False):
        model = network()
        kfac = trainer(model)
        kfac.optimizer.zero_grad()
        for seed in range(2):
            x, y = batch(seed=seed)
            outputs = model(x) if through else model[2](model[1](model[0](x)))
            (F.cross_entropy(outputs, y) / 2).backward()
        kfac.step()
        found.append(averages(kfac))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs)


def test_an_empty_batch_counts_nothing():
    """Oracle: the averages before; convolutions and linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    kfac = trainer(model)
    for count in (4, 0):
        x = torch.randn(count, 1, 4, 4, dtype=torch.float64)
        y = torch.randint(3, (count,))
        kfac.optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        kfac.step()
        found = averages(kfac)
        if count:
            before = found
    for mine, theirs in zip(found, before):
        torch.testing.assert_close(mine, theirs)


# -- the first dimension ---------------------------------------------------------------------------


class Positions(nn.Module):
    """Words and positions, as language models embed both."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])[None]
        return self.head(self.words(ids) + self.positions(places)).mT


def test_a_row_for_all_examples_is_warned_of_by_name(caplog):
    """Oracle: the name of the layer in the log; no warning with the layer in skip."""
    ids = torch.randint(7, (EXAMPLES, 5))
    for skip in (("positions",), ()):
        model = Positions().double()
        kfac = trainer(model, coverage=Coverage(skip))
        for _ in range(2):
            F.cross_entropy(model(ids), ids).backward()
            kfac.step()
        told = [r.getMessage() for r in caplog.records if "numbers of examples" in r.getMessage()]
        assert len(told) == (not skip)
    assert (
        "from the same batch: 1 examples by 'positions'; 8 examples by 'words', 'head'. " in told[0]
    )


def test_a_batch_of_one_example_is_no_mistake(caplog):
    """Oracle: no warning in the log."""
    model = Positions().double()
    kfac = trainer(model)
    ids = torch.randint(7, (1, 5))
    F.cross_entropy(model(ids), ids).backward()
    kfac.step()
    assert "numbers of examples" not in caplog.text


def test_layers_that_see_other_numbers_of_examples_are_warned_of_once(caplog):
    """Oracle: the log; an attention that is sequence first between layers that are not."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False).double()
    kfac = trainer(model)
    for _ in range(2):
        model(torch.randn(5, 3, 8, dtype=torch.float64)).square().mean().backward()
        kfac.step()
    told = [r.getMessage() for r in caplog.records if "batch_first=True" in r.getMessage()]
    assert len(told) == 1
    attention, linear = "'self_attn.in_proj', 'self_attn.out_proj'", "'linear1', 'linear2'"
    assert f": 3 examples by {attention}; 5 examples by {linear}. The first" in told[0]


class Boxes(nn.Module):
    """A backbone of images, and a head of three boxes an image, folded into the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(5, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).tanh().view(-1, 4))


def test_layers_with_examples_of_their_own_are_not_warned_of(caplog):
    """Oracle: the log, without the choice and with the choice; the same factors."""
    found = []
    for own in (["head"], []):
        torch.manual_seed(0)
        kfac = trainer(Boxes().double(), coverage=Coverage(own_examples=own))
        x, y = batch()
        F.cross_entropy(kfac.model(x), y.repeat_interleave(3)).backward()
        kfac.step()
        found.append(averages(kfac))
        told = "from the same batch: 8 examples by 'backbone'; 24 examples by 'head'."
        assert caplog.text.count(told) == (not own)
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_names_of_layers_with_examples_of_their_own_are_checked():
    """Oracle: the lines."""
    with pytest.raises(ValueError, match="own_examples names 'heads', which is not a module of"):
        trainer(Boxes().double(), coverage=Coverage(own_examples=["heads"]))
    with pytest.raises(ValueError, match=r"own_examples='head' must be a sequence of names; try"):
        Coverage(own_examples="head")


# -- arguments and objects -------------------------------------------------------------------------


class WithClosure(torch.optim.SGD):
    """An optimizer whose step needs a closure, and a scheduler that wraps the step."""

    def __init__(self, *arguments, **numbers) -> None:
        super().__init__(*arguments, **numbers)
        torch.optim.lr_scheduler.StepLR(self, 1)

    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("make", [KFAC, FirstOrderTrainer])
def test_wrong_objects_are_refused_in_one_line(make):
    """Oracle: the lines."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lacking = "cannot step: missing a required argument: 'closure'; use an optimizer whose step"
    for kind in (torch.optim.LBFGS, WithClosure):
        with pytest.raises(ValueError, match=f"optimizer={kind.__name__} {lacking}"):
            make(model, kind(model.parameters(), lr=0.1), COMM)
    with pytest.raises(ValueError, match="comm='comm-opt' must be a communicator of mpi4py"):
        make(model, sgd, "comm-opt")
    with pytest.raises(ValueError, match="strategy=3 must be a Strategy, the name of one, or None"):
        make(model, sgd, COMM, 3)
    with pytest.raises(ValueError, match="optimizer=Sequential must be a torch.optim.Optimizer"):
        make(model, model, COMM)
    weights = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"1 trained parameters that the model lacks .*\(3,\)"):
        make(model, torch.optim.SGD([*model.parameters(), weights], lr=0.1), COMM)
    trained = make(model, sgd, COMM)
    with pytest.raises(ValueError, match=r"step\(\) accepts a GradScaler or None, not function"):
        trained.step(lambda: 0.0)
    with pytest.raises(AttributeError, match="optimizer"):
        trained.optimizer = sgd


@pytest.mark.parametrize("way", ["added", "thawed"])
@pytest.mark.parametrize("kind", [KFAC, FirstOrderTrainer])
def test_the_optimizer_steps_the_model_alone_also_later(kind, way):
    """Oracle: the line, before the step; every rank would step the parameter alone."""
    model, outside = network(), nn.Parameter(torch.zeros(3).double(), way == "added")
    parameters = [*model.parameters(), *([outside] if way == "thawed" else [])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    trainer = kind(model, optimizer, COMM)
    learn(trainer)
    if way == "added":
        optimizer.add_param_group({"params": [outside]})
    outside.requires_grad_(True).grad = torch.ones_like(outside)
    with pytest.raises(ValueError, match=r"1 trained parameters that the model lacks .*\(3,\)"):
        trainer.step()
    assert trainer.steps == 1


def test_an_optimizer_may_still_have_a_layer_that_was_replaced():
    """Oracle: the steps; nobody trains the older layer."""
    model = network()
    trainer = FirstOrderTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), COMM)
    learn(trainer)
    model[2] = nn.Linear(6, 3).double()
    trainer.optimizer.add_param_group({"params": [*model[2].parameters()]})
    for _ in range(2):
        learn(trainer)
    assert trainer.steps == 3


def test_true_is_no_damping():
    model = network()
    with pytest.raises(ValueError, match="damping=True must be a finite number"):
        KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), COMM, damping=True)


@pytest.mark.parametrize(
    ("change", "refused"),
    [(partial(prune.random_unstructured, name="weight", amount=0.5), True), (spectral_norm, False)],
)
def test_a_weight_that_is_computed_from_now_on_is_seen(change, refused):
    """Oracle: the line of a new trainer, or the layers that a new trainer covers."""
    kfac = trainer(network())
    learn(kfac)
    change(kfac.model[0])
    if refused:
        with pytest.raises(UserError, match="adopted: layer '0': the weight is computed"):
            learn(kfac)
    else:
        learn(kfac)
        assert [layer.name for layer in kfac.plan.layers] == ["2"]


@pytest.mark.parametrize("make", [KFAC, FirstOrderTrainer])
def test_a_converted_model_is_refused(make):
    """Oracle: the line."""
    model = network().float()
    trained = make(model, torch.optim.SGD(model.parameters(), lr=0.1), COMM)
    model.double()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="a parameter is torch.float64 on cpu, but was torch"):
        trained.step()


def test_a_newer_trainer_detaches_the_older_one(caplog):
    """Oracle: the hooks of the model, and the log; a cell of a notebook that runs twice."""
    model = network()
    first = trainer(model)
    hooks = len(model[0]._forward_hooks)
    second = trainer(model)
    assert len(model[0]._forward_hooks) == hooks == 1
    assert "the model's previous KFAC has been detached" in caplog.text
    learn(second)
    with pytest.raises(RuntimeError, match="no covered layer took part"):
        learn(first)


def test_a_trainer_that_is_gone_is_not_kept():
    """Oracle: the garbage collector."""
    model = network()
    trainer(model)
    gc.collect()
    caught = trainer(model)
    assert repr(caught).startswith("KFAC(2 layers covered, 0 tensors trained first-order, 1 ranks")


@pytest.mark.gate
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [KFAC, FirstOrderTrainer])
def test_dropped_trainers_leave_nothing_in_a_model(kind, overlap):
    """Oracle: the number of live parts of trainers, and of hooks on the model."""
    model, strategy = network(), Strategy(transport=Transport(overlap=overlap))
    found = []
    for seed in range(3):
        one = kind(model, torch.optim.SGD(model.parameters(), lr=0.01), COMM, strategy)
        learn(one, seed=seed)
        del one
        found.append(inside.live_parts())
    assert len(set(found)) == 1
    hooks = [
        model._load_state_dict_post_hooks,
        *(p._post_accumulate_grad_hooks for p in model.parameters()),
    ]
    assert not any(hooks)


@pytest.mark.gate
def test_a_trainer_that_a_weight_refers_to_ends_with_its_model():
    """Oracle: the number of live parts of trainers before."""
    before = inside.live_parts()
    model = network()
    one = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), COMM)
    model[0].weight.register_hook(lambda g, trainer=one: g * (trainer.steps >= 0))
    learn(one, seed=0)
    del one, model
    assert inside.live_parts() == before


def test_a_copied_model_has_hooks_that_do_nothing():
    """Oracle: averages of a trainer whose model has no copy."""
    expected, kfac = (trainer(network()) for _ in range(2))
    other = copy.deepcopy(kfac.model)
    x, y = batch(seed=1)
    F.cross_entropy(other(x), y).backward()
    for one in (expected, kfac):
        learn(one)
    for mine, theirs in zip(averages(kfac), averages(expected)):
        assert torch.equal(mine, theirs)


def test_little_coverage_is_warned_of(caplog):
    """Oracle: 33 of 63 weights are covered, or 21 are, or none."""
    for skip, told in (((), False), (("0",), True), (("0", "2"), True)):
        caplog.clear()
        trainer(network(), coverage=Coverage(skip))
        assert ("weights; the rest" in caplog.text) == told


@pytest.mark.parametrize("fisher_type", ["empirical", "mc", "type-2"])
def test_outputs_that_are_not_finite_are_left_out(fisher_type):
    """Oracle: averages and weights before the batch."""
    kfac = trainer(network(), estimator=Estimator(fisher_type=fisher_type))

    def step(scale: float) -> None:
        x, y = batch()
        kfac.optimizer.zero_grad()
        outputs = kfac.model(scale * x)
        kfac.record(outputs)
        F.cross_entropy(outputs, y).backward()
        kfac.step()

    step(1.0)
    before, weight = averages(kfac), kfac.model[0].weight.clone()
    step(torch.inf)
    assert all(map(torch.equal, averages(kfac), before))
    assert torch.equal(kfac.model[0].weight, weight)


def test_a_state_of_the_trainer_itself_can_be_loaded():
    """Oracle: the averages before; the state shares memory with the trainer."""
    kfac = trainer(network())
    learn(kfac)
    before = averages(kfac)
    kfac.load_state_dict(kfac.state_dict())
    assert all(map(torch.equal, averages(kfac), before))


def test_a_rate_in_a_tensor_is_part_of_the_state():
    """Oracle: the rate that was saved, in the tensor that a compiled step reads."""
    model = network()
    rate = torch.tensor(0.1)
    kfac = KFAC(model, torch.optim.Adam(model.parameters(), lr=rate), COMM, damping=0.01)
    learn(kfac)
    state = copy.deepcopy(kfac.state_dict())
    rate.fill_(0.5)
    kfac.load_state_dict(state)
    assert rate == torch.tensor(0.1) and kfac.optimizer.param_groups[0]["lr"] is rate


def test_a_frozen_layer_with_a_parameter_of_its_own_is_refused_by_name():
    """Oracle: the line."""
    model = network()
    model[0].requires_grad_(False)
    model[0].scale = nn.Parameter(torch.ones(6).double())
    with pytest.raises(ValueError, match="layer '0': weight and bias are not trained"):
        trainer(model)


def test_an_attention_may_lose_a_weight():
    """Oracle: the frozen weight stays, and the bias learns."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(5, 1, batch_first=True)
    model = nn.Sequential(Attended(attention), nn.Linear(5, 3)).double()
    kfac = trainer(model)
    learn(kfac)
    attention.out_proj.weight.requires_grad_(False)
    weight, bias = attention.out_proj.weight.clone(), attention.out_proj.bias.clone()
    for _ in range(2):
        learn(kfac)
    assert torch.equal(attention.out_proj.weight, weight)
    assert not torch.equal(attention.out_proj.bias, bias)


class Attended(nn.Module):
    """An attention of every example to itself."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        return self.attention(x, x, x)[0][:, 0]


def test_a_bound_below_0_is_refused():
    """Oracle: the line, and the weights before."""
    kfac = trainer(network())
    before = kfac.model[0].weight.clone()
    x, y = batch()
    F.cross_entropy(kfac.model(x), y).backward()
    with pytest.raises(ValueError, match=r"max_norm=-1.0 must be a finite number"):
        kfac.step(max_norm=-1.0)
    assert torch.equal(kfac.model[0].weight, before)


def test_no_pass_is_recorded_after_the_end():
    """Oracle: the sums, all 0."""
    kfac = trainer(network())
    learn(kfac)
    kfac.close()
    x, y = batch()
    F.cross_entropy(kfac.model(x), y).backward()
    assert not inside.statistics(kfac).flat.any()


def test_a_loaded_statistic_outlives_a_batch_of_nan():
    """Oracle: the loaded running mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    kfac = trainer(model)
    learn(kfac)
    state = model.state_dict()
    state["1.running_mean"] = torch.full((4,), 7.0, dtype=torch.float64)
    model.load_state_dict(state)
    x, y = batch()
    kfac.optimizer.zero_grad()
    F.cross_entropy(model(x * torch.nan), y).backward()
    kfac.step()
    assert torch.equal(model[1].running_mean, state["1.running_mean"])


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (torch.zeros(4, 1), "the cross-entropy of a single output"),
        (torch.full((4, 3), 1 / 3), "probabilities"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(outputs, told):
    """Oracle: the lines."""
    torch.manual_seed(0)
    model = nn.Linear(5, outputs.shape[1])
    kfac = trainer(model, estimator=Estimator(fisher_type="mc"))
    made = model(torch.randn(4, 5)) * 0 + outputs
    with pytest.raises(ValueError, match=told):
        kfac.record(made)


def test_positions_of_a_loss_count_in_the_empirical_fisher():
    """Oracle: the mean of squares of gradients of each position's own loss, by autograd."""
    torch.manual_seed(0)
    model, positions = nn.Linear(5, 3).double(), 6
    kfac = trainer(model, estimator=Estimator(num_per_example_loss_terms=positions))
    x = torch.randn(4, positions, 5, dtype=torch.float64)
    y = torch.randint(3, (4, positions))
    outputs = model(x)
    F.cross_entropy(outputs.mT, y).backward()
    kfac.step()
    logits = outputs.detach().reshape(-1, 3).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits, y.reshape(-1), reduction="sum"), logits)
    expected = g.T @ g / len(g)
    found = mpikfac.numerics.unfold_triangle(inside.factors(kfac)[".G"])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("preconditioner", ["eigen", "ekfac"])
def test_badly_scaled_inputs_get_directions_of_float64(preconditioner):
    """Oracle: the same step in float64; columns from 1e-4 to 1e4."""
    torch.manual_seed(0)
    x = torch.randn(64, 40) * torch.logspace(-4, 4, 40)
    y = torch.randint(3, (64,))
    directions = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Linear(40, 3).to(dtype)
        with torch.no_grad():
            model.weight.mul_(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        kfac = KFAC(
            model,
            optimizer,
            COMM,
            damping=1e-3,
            preconditioner=preconditioner,
            grafting=NoGrafting(),
        )
        F.cross_entropy(model(x.to(dtype)), y).backward()
        kfac.step()
        directions.append(model.weight.grad.double())
    mine, precise = directions
    assert (mine - precise).norm() < 0.03 * precise.norm()


def test_little_damping_in_float32_is_warned_of_once(caplog):
    """Oracle: the log; not in float64."""
    for dtype in (torch.float64, torch.float32):
        model = network().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, COMM, damping=1e-10, inv_update_steps=1)
        for seed in range(2):
            x, y = batch(seed=seed)
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(dtype)), y).backward()
            kfac.step()
        told = [r.getMessage() for r in caplog.records if "too few digits" in r.getMessage()]
        assert len(told) == (dtype == torch.float32)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("preconditioner", "damping"), [("eigen", 1e-3), ("inverse", 1e-5), (problem.UNSPLIT, 1e-1)]
)
def test_pixels_that_are_not_normalised_are_warned_of_once(preconditioner, damping, caplog):
    """Oracle: the log, and directions in float64: wrong if and only if a warning came."""
    torch.manual_seed(0)
    smooth, y = F.avg_pool2d(torch.rand(192, 1, 14, 14), 3, 1), torch.randint(10, (192,))
    plain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))

    def direction(dtype: torch.dtype, largest: float) -> torch.Tensor:
        model = copy.deepcopy(plain).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        choices = {
            "preconditioner": preconditioner,
            "damping": damping,
            "grafting": NoGrafting(),
            "inv_update_steps": 1,
        }
        kfac = KFAC(model, optimizer, COMM, **choices)
        for some, labels in zip(smooth.split(64), y.split(64)):
            optimizer.zero_grad()
            F.cross_entropy(model((largest * some).to(dtype)), labels).backward()
            kfac.step()
        return model[3].weight.grad.double()

    for largest, much in ((255.0, True), (1.0, False)):
        mine, precise = direction(torch.float32, largest), direction(torch.float64, largest)
        told = [r for r in caplog.records if "float32 rounds the factors" in r.getMessage()]
        caplog.clear()
        assert len(told) == much
        assert ((mine - precise).norm() > 0.02 * precise.norm()) == much


@pytest.mark.parametrize("wrong", [{"max_norm": -1.0}, {"examples": -1}, {"examples": 2.5}])
def test_a_step_with_a_wrong_number_changes_nothing(wrong):
    """Oracle: a trainer whose program gives right numbers at once; the passes are not repeated."""
    states = []
    for numbers in ({}, wrong):
        model = network()
        trained = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), COMM)
        model(torch.ones(2, 5).double()).sum().backward()
        if numbers:
            with pytest.raises(ValueError, match=f"{next(iter(numbers))}="):
                trained.step(**numbers)
        trained.step()
        states.append(trained.state_dict())
    for name, value in states[0].items():
        assert not torch.is_tensor(value) or torch.equal(value, states[1][name]), name


class WithoutRate(torch.optim.Optimizer):
    """An optimizer whose groups have no learning rate."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.01)


@pytest.mark.parametrize("choice", ["clip", "damping"])
def test_a_choice_that_needs_rates_names_the_optimizer(choice):
    """Oracle: the line, before any communication."""
    settings = {
        "clip": {"clip": KLClip(kl_clip=0.001), "damping": 0.01},
        "damping": {"grafting": NoGrafting(), "damping": mpikfac.LevenbergMarquardt()},
    }[choice]
    model = network()
    with pytest.raises(ValueError, match=f"^{choice}.* needs learning rates, but WithoutRate has"):
        KFAC(model, WithoutRate(model.parameters()), COMM, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"grafting": NoGrafting()},
        {"clip": FisherClip(max_norm=0.1)},
        {"clip": NormClip(max_norm=0.1)},
        {"grafting": AdamGrafting()},
    ],
    ids=repr,
)
def test_other_lengths_need_no_rate(settings):
    """Oracle: SGD at the same rate, to the last bit."""
    weights = []
    for kind in (WithoutRate, lambda parameters: torch.optim.SGD(parameters, lr=0.01)):
        model = network()
        kfac = KFAC(model, kind(model.parameters()), COMM, damping=0.01, **settings)
        learn(kfac)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def tenfold(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return 10 * output


def tenfold_in_place(_: nn.Module, __: object, output: torch.Tensor) -> None:
    output.mul_(10)


def of_all_modules(module: nn.Module, hook):
    """Register a global hook that acts on one module."""

    def on_one(called, *rest):
        return hook(called, *rest) if called is module else None

    return nn.modules.module.register_module_forward_hook(on_one)


def of_all_modules_first(module: nn.Module, hook):
    handle = of_all_modules(module, hook)
    nn.modules.module._global_forward_hooks.move_to_end(handle.id, last=False)
    return handle


PROGRAM_HOOKS = {
    "global": of_all_modules,
    "first of all global": of_all_modules_first,
    "of the module": lambda module, hook: module.register_forward_hook(hook),
    "first of the module": lambda module, hook: module.register_forward_hook(hook, prepend=True),
}


@pytest.mark.parametrize("when", ["before", "after", "between two steps"])
@pytest.mark.parametrize("changes", [tenfold, tenfold_in_place])
@pytest.mark.parametrize("register", PROGRAM_HOOKS)
def test_a_hook_that_changes_outputs_changes_no_factor(register, changes, when):
    """Oracle: the hook as a module of the model, behind the layer that it changes."""

    class Tenfold(nn.Module):
        def forward(self, x):
            return 10 * x

    before = when == "between two steps"
    expected = trainer(nn.Sequential(*network(), nn.Identity() if before else Tenfold()).double())
    model = network()
    kfac = trainer(model) if when != "before" else None
    if before:
        learn(kfac)
        learn(expected)
        expected.model[3].forward = Tenfold().forward
    handle = PROGRAM_HOOKS[register](model[2], changes)
    kfac = kfac or trainer(model)
    for one in (kfac, expected):
        learn(one, seed=1)
    handle.remove()
    for mine, theirs in zip(averages(kfac), averages(expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    kfac.close()
    expected.close()
    assert not nn.modules.module._global_forward_hooks
    assert not any(module._forward_hooks for module in model.modules())


class Lookahead(torch.optim.Optimizer):
    """A wrapper that does not call the constructor of its base, as many do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.state, self.param_groups = base, base.state, base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


class Delegating(torch.optim.Optimizer):
    """A wrapper that passes on all that it does not define, also the base's hooks."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    def __getattr__(self, name):
        return getattr(vars(self)["base"], name)

    def step(self, closure=None):
        return self.base.step(closure)


@pytest.mark.parametrize("wrapper", [Lookahead, Delegating])
@pytest.mark.parametrize("make", [KFAC, FirstOrderTrainer])
def test_a_wrapping_optimizer_steps(make, wrapper):
    """Oracle: the wrapped optimizer alone, to the last bit; a second step is refused."""
    weights = []
    for wrap in (lambda base: base, wrapper):
        model = network()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        trained = make(model, optimizer, COMM)
        for seed in range(3):
            learn(trained, seed=seed)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
        with pytest.raises(ValueError, match="steps the optimizer itself"):
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("missing", ["param_groups", "state"])
def test_a_wrapping_optimizer_without_attributes_is_refused_with_a_remedy(missing):
    """Oracle: the line."""
    model = network()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    delattr(optimizer, missing)
    with pytest.raises(ValueError, match=rf"optimizer=Lookahead has no {missing}; call super\(\)"):
        KFAC(model, optimizer, COMM)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_hooks_is_not_scripted():
    """Oracle: the line, and after `close` the outputs of the scripted model."""
    kfac = trainer(network())
    learn(kfac)
    for model in (kfac.model, copy.deepcopy(kfac.model).eval()):
        with pytest.raises(AttributeError, match=r"call the trainer's close\(\) before"):
            torch.jit.script(model)
    kfac.close()
    x, _ = batch()
    torch.testing.assert_close(torch.jit.script(kfac.model)(x), kfac.model(x))


class Attending(nn.Module):
    """A convolution, running statistics and an attention: layers with hooks of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.patches(x)).flatten(2).mT
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def saved_and_loaded(model: nn.Module, _: torch.Tensor) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def traced_and_loaded(model: nn.Module, x: torch.Tensor) -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


CAPTURES = {
    "trace": torch.jit.trace,
    "trace, save and load": traced_and_loaded,
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "save and load": saved_and_loaded,
    "make_fx": lambda model, x: make_fx(model)(x),
    "compile": lambda model, _: torch.compile(model, backend="eager"),
}


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore")  # torch deprecates tracing, and compares random graphs
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_trained_model_is_captured_and_trains_on(capture, training):
    """Oracle: outputs of a model without hooks, and weights and averages of an undisturbed run."""
    found = []
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 3
    for captured in (True, False):
        torch.manual_seed(0)
        kfac = trainer(Attending())
        for step in range(3):
            if step == 1:
                plain = Attending().train(training)
                plain.load_state_dict(kfac.model.state_dict())
                kept = copy.deepcopy(plain.state_dict())
                kfac.model.train(training)
                with torch.set_grad_enabled(training):  # torch's own attention needs it in eval()
                    other = CAPTURES[capture](kfac.model, x) if captured else plain
                    torch.testing.assert_close(other(x), plain(x), atol=1e-5, rtol=0)
                kfac.model.train().load_state_dict(kept)  # running statistics
            kfac.optimizer.zero_grad()
            F.cross_entropy(kfac.model(x), y).backward()
            kfac.step()
        found.append([*kfac.model.state_dict().values(), *averages(kfac)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("grad", [False, True])
def test_a_thread_that_tests_the_model_interrupts_nothing(grad, caplog):
    """Oracle: a trainer without the thread; the log has no line about an interruption."""
    found = []
    for tests in (True, False):
        kfac = trainer(network())
        x, y = batch()

        def test(_, kfac=kfac, x=x):
            with torch.set_grad_enabled(grad):
                kfac.model(x)

        def in_thread(_, test=test):
            thread = threading.Thread(target=test, args=(None,))
            thread.start()
            thread.join()

        hidden = kfac.model[1](kfac.model[0](x))
        if tests:
            hidden.register_hook(in_thread)
        F.cross_entropy(kfac.model[2](hidden), y).backward()
        kfac.step()
        found.append(averages(kfac))
    assert all(map(torch.equal, *found))
    assert "interrupted" not in caplog.text


def test_a_complex_parameter_is_refused_with_a_remedy():
    """Oracle: the line."""
    model = network()
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match=r"wave is torch.complex64; .*view_as_real.*or freeze it"):
        FirstOrderTrainer(model, torch.optim.SGD([model.wave], lr=0.1), COMM)


def test_layers_of_two_dtypes_are_refused_with_a_remedy():
    """Oracle: the line."""
    model = network()
    model[2].float()
    with pytest.raises(ValueError, match=r"convert all with model.to\(...\), .*or freeze 2"):
        trainer(model)


def test_two_trainers_of_shared_parameters_are_told(caplog):
    """Oracle: the log; no line once a trainer is detached, or for models that share nothing."""
    model = network()
    whole = trainer(model)
    part = trainer(model[0])
    assert caplog.text.count("both trainers update them") == 1
    whole.detach()
    part.detach()
    kept = [trainer(model[2]), trainer(network())]
    assert caplog.text.count("both trainers update them") == 1 and len(kept) == 2


PENALTIES = {
    "none": lambda model, x: 0.0,
    "of weights": lambda model, x: 0.5 * model[0].weight.square().sum(),
    "of orthogonality": lambda model, x: (model[0].weight @ model[0].weight.T).square().sum(),
    "of products": lambda model, x: F.linear(x, model[0].weight).square().mean(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_gradient_that_no_call_makes_is_told_once(penalty, dtype, caplog):
    """Oracle: the log; no line for the loss alone, in any dtype, nor for micro-batches."""
    model = network().to(dtype)
    kfac = trainer(model)
    for seed in range(5):
        x, y = batch(count=64, seed=seed)
        kfac.optimizer.zero_grad()
        for some, labels in zip(x.to(dtype).chunk(2), y.chunk(2)):
            loss = F.cross_entropy(model(some), labels) + PENALTIES[penalty](model, some)
            (loss / 2).backward()
        kfac.step()
    told = [
        r.getMessage()
        for r in caplog.records
        if "differs from the one computed from the module's calls" in r.msg
    ]
    assert len(told) == (penalty != "none")
    assert all(line.startswith("layer '0': ") for line in told)


@pytest.mark.parametrize(("first", "warnings"), [(2, 1), (3, 0)])
def test_three_passes_are_compared(first, warnings, caplog):
    """Oracle: the log; the penalty begins in the third pass, or in the fourth."""
    model = network()
    kfac = trainer(model)
    for number in range(4):
        x, y = batch(seed=number)
        kfac.optimizer.zero_grad()
        penalty = PENALTIES["of weights"](model, x) if number >= first else 0.0
        (F.cross_entropy(model(x), y) + penalty).backward()
        kfac.step()
    assert caplog.text.count("differs from the one computed from the module's calls") == warnings


class Cells(nn.Module):
    """Two kinds of cells over a few steps of time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(5, 4), nn.GRUCell(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = hidden = None
        for each in x.unbind(1):
            state = self.lstm(each, state)
            hidden = self.gru(state[0], hidden)
        return hidden


class Attention(nn.Module):
    """An attention of queries of width 4, to keys and values of these widths."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **settings)
        self.keys = nn.Linear(4, settings.get("kdim", 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.keys(x.sin())
        return self.attention(x, keys, keys)[0].mean(1)


COMPARED = {
    "1-D": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (6, 2, 9)),
    "2-D": (lambda: nn.Conv2d(2, 4, 3, bias=False), (6, 2, 6, 6)),
    "3-D": (lambda: nn.Conv3d(1, 3, 2), (6, 1, 4, 4, 4)),
    "groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2)), (6, 4, 6, 6)),
    "same": (lambda: nn.Conv2d(2, 4, (2, 3), padding="same"), (6, 2, 6, 6)),
    "circular": (
        lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular"),
        (6, 2, 5, 5),
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
        (6, 4, 4, 4),
    ),
    "one image": (lambda: nn.Conv2d(2, 4, 3), (2, 6, 6)),
    "channels last": (
        lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
        (6, 2, 6, 6),
    ),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=2), (6, 3)),
    "cells": (Cells, (6, 3, 5)),
    "attention": (Attention, (6, 3, 4)),
    "batch first, no bias": (lambda: Attention(batch_first=True, bias=False), (6, 3, 4)),
    "keys of another width": (lambda: Attention(kdim=5, vdim=5), (6, 3, 4)),
    "one sequence": (Attention, (3, 4)),
}
WEIGHTS = {
    "none": lambda weights: 0.0,
    "one": lambda weights: 5.0 * weights[0].pow(2).sum(),
    "last": lambda weights: 5.0 * (weights[-1].pow(4) + weights[-1]).sum(),
}


@pytest.mark.parametrize(
    ("penalised", "dtype"),
    [("none", torch.bfloat16), *((penalised, torch.float32) for penalised in WEIGHTS)],
)
@pytest.mark.parametrize("kind", COMPARED)
def test_gradients_of_all_kinds_of_layers_are_compared(kind, penalised, dtype, caplog):
    """Oracle: the log; no line for the loss alone."""
    make, shape = COMPARED[kind]
    torch.manual_seed(0)
    model = make().to(dtype)
    made = torch.Generator().manual_seed(1)
    weights = [p for p in model.parameters() if p.dim() > 1]
    kfac = trainer(model)
    for _ in range(2):
        x = torch.randn(shape, generator=made).to(dtype)
        if kind == "embedding":
            x = torch.randint(7, shape, generator=made)
        kfac.optimizer.zero_grad()
        (model(x).float().square().mean() + WEIGHTS[penalised](weights)).backward()
        kfac.step()
    told = [
        r.getMessage()
        for r in caplog.records
        if "differs from the one computed from the module's calls" in r.msg
    ]
    assert len(told) == (penalised != "none"), told


def test_no_pass_is_compared_after_a_loss_with_derivatives(monkeypatch):
    """Oracle: the calls of the layers' projections, of which a later pass needs none."""
    model = network()
    kfac = trainer(model, factor_update_steps=1)
    compared = []
    project = mpikfac.layers.Layer.projections
    monkeypatch.setattr(
        mpikfac.layers.Layer,
        "projections",
        lambda layer, *rest: compared.append(layer.name) or project(layer, *rest),
    )
    for step in range(3):
        x, y = batch(seed=step)
        x.requires_grad_()
        kfac.optimizer.zero_grad()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        (F.cross_entropy(outputs, y) + slope.square().mean()).backward()
        kfac.step()
        if step == 0:
            compared.clear()
    assert compared == []


def test_owners_of_no_trained_weight_take_a_step():
    """Oracle: the weights before, and running statistics that follow the batches."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    strategy = Strategy(mpikfac.MemOpt(shard_optimizer=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first_order = FirstOrderTrainer(model, optimizer, COMM, strategy)
    model(batch()[0].float())
    first_order.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert model[1].running_mean.any()


def test_a_converted_model_is_told_with_owners():
    """Oracle: the error of a converted model, which names no device or shape of the check."""
    model = network()
    strategy = Strategy(mpikfac.MemOpt(shard_optimizer=True))
    kfac = KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), COMM, strategy)
    learn(kfac)
    model.float()
    x, y = batch()
    kfac.optimizer.zero_grad()
    F.cross_entropy(model(x.float()), y).backward()
    with pytest.raises(ValueError, match="was torch.float64 on cpu when the trainer was created"):
        kfac.step()


@pytest.mark.parametrize("shape", [(6, 4), (0, 4)])
def test_writes_to_weights_with_gaps_in_memory_are_found(shape):
    """Oracle: the names of the weights that are written; a state that is loaded writes none."""
    weights = {"gaps": nn.Parameter(torch.randn(6, 8)[:, :4]), "dense": nn.Parameter(torch.ones(3))}
    weights["empty"] = nn.Parameter(torch.ones(shape))
    writes = mpikfac.model.Writes(weights)
    writes.look(0)
    with torch.no_grad():
        weights["gaps"].add_(1)
    writes.look(1)
    assert [[*found] for found in writes.recent.values()] == [[], ["gaps"]]
    writes.reset()
    writes.look(2)
    assert writes.recent == {2: {}}


def test_the_mode_of_a_call_decides_how_its_statistics_normalise():
    """Oracle: a loop that changes the mode after the backward pass."""
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        coverage = mpikfac.Coverage(covers={**mpikfac.KINDS, **mpikfac.NORMS})
        kfac = trainer(model, coverage=coverage, factor_update_steps=1)
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        model.train(not early)
        loss.backward()
        model.train()
        kfac.step()
        found.append(averages(kfac))
    assert all(map(torch.equal, *found))
