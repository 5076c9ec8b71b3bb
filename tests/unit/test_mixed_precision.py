"""Autocast and scaled losses: factors of rounded passes, and steps skipped as torch skips them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import MemOpt, Strategy, Transport
from mpikfac.numerics import triangles
from support import inside, oracles, problem

BFLOAT16 = torch.autocast("cpu", torch.bfloat16)


def trainer(comm, model, **settings):
    return problem.kfac(model, problem.sgd_all(model), comm, **problem.SETTINGS | settings)


def network():
    """Return Conv - BatchNorm - ReLU - Linear in float32, the norm in training."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Flatten(), nn.Linear(324, 5)]
    return nn.Sequential(*layers)


def batch(step):
    images, labels = problem.batch(step)
    return images.float(), labels


def factors(kfac):
    return {n: triangles.unfold_triangle(packed) for n, packed in inside.factors(kfac).items()}


# -- autocast ------------------------------------------------------------------------------------


class Rounded(nn.Module):
    """Autocast's computation, written out: input, weight and bias are rounded."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.bfloat16()
        return self.computed(x.bfloat16(), self.weight.bfloat16(), bias)


class Linear(Rounded, nn.Linear):
    computed = staticmethod(F.linear)


class Conv2d(Rounded, nn.Conv2d):
    def computed(self, *args):
        return F.conv2d(*args, self.stride, self.padding)


def layered(conv, linear):
    torch.manual_seed(2)
    layers = [conv(2, 9, 3, padding=1, bias=False), nn.ReLU(), conv(9, 4, 3, stride=2)]
    return nn.Sequential(*layers, nn.Flatten(), linear(36, 7), nn.Tanh(), linear(7, 5))


def mean_loss(outputs, labels):
    return F.cross_entropy(outputs.float(), labels)


@pytest.mark.parametrize("loss_too", [False, True])
def test_factors_under_autocast_are_those_of_what_layers_multiplied(comm, loss_too):
    """Oracle: a pass with all rounding written out, without autocast, and sums in float64."""
    kfac = trainer(comm, layered(nn.Conv2d, nn.Linear))
    images, labels = batch(0)
    with BFLOAT16:
        outputs = kfac.model(images)
        if loss_too:
            mean_loss(outputs, labels).backward()
    if not loss_too:
        mean_loss(outputs, labels).backward()
    kfac.step()
    plain = layered(Conv2d, Linear)
    seen = oracles.calls(plain, (images.bfloat16(), labels), mean_loss)
    for name, (a, g) in seen.items():
        assert (a.dtype, g.dtype) == (torch.bfloat16, torch.bfloat16)
        a, g = a.double(), g.double()
        expected = {"A": a.T @ a / len(a), "G": len(labels) * g.T @ g}
        for side, factor in expected.items():
            found = factors(kfac)[f"{name}.{side}"]
            assert found.dtype == torch.float32
            scale = factor.abs().max().item()
            torch.testing.assert_close(found.double(), factor, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("preconditioner", ["inverse", "eigen", "ekfac", "eva"])
def test_a_step_under_autocast_is_taken_in_float32(comm, preconditioner):
    """Oracle: the same step outside autocast, to the last bit."""
    states = []
    for under in (False, True):
        kfac = trainer(comm, network(), preconditioner=preconditioner)
        images, labels = batch(0)
        with BFLOAT16:
            outputs = kfac.model(images)
        mean_loss(outputs, labels).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            kfac.step()
        states.append(problem.state(kfac.model))
    assert torch.equal(*states)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.out = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.norm(self.words(x)).mean(1))


@pytest.mark.parametrize("fisher_type", ["empirical", "type-2", "mc"])
def test_other_layers_and_fishers_follow_autocast(comm, fisher_type):
    """Oracle: the pass in float32, to the rounding of bfloat16 in sums of 12 examples."""
    found = []
    for under in (False, True):
        covers = {**mpikfac.KINDS, **mpikfac.NORMS}
        kfac = trainer(comm, Words(), fisher_type=fisher_type, covers=covers)
        words = torch.randint(9, (12, 4), generator=torch.Generator().manual_seed(3))
        torch.manual_seed(4)  # for the drawn labels
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            outputs = kfac.model(words)
            kfac.record(outputs)
        mean_loss(outputs, batch(0)[1]).backward()
        kfac.step()
        found.append(factors(kfac))
    for name, factor in found[0].items():
        error = (found[1][name] - factor).norm() / factor.norm()
        assert error < 0.02, name


# -- models in bfloat16 --------------------------------------------------------------------------


def test_factors_of_a_bfloat16_model_are_sums_in_float32(comm):
    """Oracle: the model's pass with sums in float64; the step takes the rounded directions."""
    images, labels = batch(0)
    rounded = images.bfloat16(), labels
    kfac = trainer(comm, layered(nn.Conv2d, nn.Linear).bfloat16(), kl_clip=None)
    plain = layered(nn.Conv2d, nn.Linear).bfloat16()
    mean_loss(kfac.model(rounded[0]), labels).backward()
    kfac.step()
    for name, (a, g) in oracles.calls(plain, rounded, mean_loss).items():
        a, g = a.double(), g.double()
        expected = {"A": a.T @ a / len(a), "G": len(labels) * g.T @ g}
        for side, factor in expected.items():
            found, scale = factors(kfac)[f"{name}.{side}"], factor.abs().max().item()
            torch.testing.assert_close(found.double(), factor, rtol=1e-5, atol=1e-6 * scale)
        gradient = oracles.gradient_matrix(plain.get_submodule(name)).double()
        direction = oracles.kronecker_solve(gradient, expected["A"], expected["G"], 0.01)
        found = inside.directions(kfac)[name].double()
        torch.testing.assert_close(found, direction, rtol=1e-3, atol=1e-3)
        weight = kfac.model.get_submodule(name).weight
        assert weight.dtype == weight.grad.dtype == torch.bfloat16
        written = oracles.gradient_matrix(kfac.model.get_submodule(name))
        assert torch.equal(written, inside.directions(kfac)[name].bfloat16())


def test_sgd_of_a_bfloat16_model_is_torchs(comm):
    """Oracle: plain torch, to the last bit."""
    model, plain = network().bfloat16(), network().bfloat16()
    data, optimizer = (
        mpikfac.FirstOrderTrainer(model, problem.sgd_all(model), comm),
        problem.sgd_all(plain),
    )
    for step in range(3):
        images, labels = batch(step)
        for trained, stepper in ((model, data), (plain, optimizer)):
            trained.zero_grad()
            mean_loss(trained(images.bfloat16()), labels).backward()
            stepper.step()
    assert torch.equal(problem.state(model), problem.state(plain))
    assert data.votes.dtype == torch.float32


def test_a_bfloat16_run_goes_on_to_the_last_bit(comm):
    """Oracle: the uninterrupted run."""

    def run(kfac, steps):
        for step in steps:
            images, labels = batch(step)
            kfac.optimizer.zero_grad()
            mean_loss(kfac.model(images.bfloat16()), labels).backward()
            kfac.step()

    first, second = (trainer(comm, network().bfloat16()) for _ in range(2))
    run(first, range(4))
    second.load_state_dict(first.state_dict())
    run(first, range(4, 7))
    run(second, range(4, 7))
    assert_equal(everything(second), everything(first))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_frequencies_of_a_bfloat16_embedding_are_exact(comm, sharing):
    """Oracle: 1001 of 1004, although bfloat16 has no 1001; or squared means over examples."""

    def rule(layer):
        return dataclasses.replace(layer, kfac_approx=sharing)

    model = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(502, 5)).bfloat16()
    kfac = trainer(comm, model, rule=rule, skip=["2"])
    words = torch.zeros(4, 251, dtype=torch.int64)
    words[0, :3] = 1
    mean_loss(kfac.model(words), torch.tensor([0, 1, 2, 3])).backward()
    kfac.step()
    expected = [1001 / 1004, 3 / 1004, 0]
    if sharing == "reduce":
        expected = [((248 / 251) ** 2 + 3) / 4, (3 / 251) ** 2 / 4, 0]
    found = inside.factors(kfac)["0.A"].flatten().tolist()
    assert found == pytest.approx(expected, rel=2e-5)


# -- scaled losses -------------------------------------------------------------------------------


def scaler(scale=2.0**10, **choices):
    return torch.amp.GradScaler("cpu", init_scale=scale, **choices)


def learn(trainer, step, scaler=None, record=False, spoil=None):
    """Take a step on a batch, scaled if there is a scaler; `spoil` may change the images."""
    images, labels = batch(step)
    trainer.optimizer.zero_grad()
    outputs = trainer.model(spoil(images) if spoil else images)
    if record:
        trainer.record(outputs)
    loss = F.cross_entropy(outputs, labels)
    (scaler.scale(loss) if scaler else loss).backward()
    trainer.step(scaler)


def everything(trainer):
    """Return a copy of a trainer's state except the number of steps."""
    state = trainer.state_dict()
    del state["trainer/steps"], state["model/1.num_batches_tracked"]
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, name


@pytest.mark.parametrize(
    "settings",
    [
        {"preconditioner": "inverse"},
        {"preconditioner": "eva"},
        {"fisher_type": "type-2"},
        {"fisher_type": "mc"},
        {"fisher_type": "forward-only"},
        {"covers": {**mpikfac.KINDS, **mpikfac.NORMS}, "normalization": "sc20"},
        {
            "strategy": Strategy(
                MemOpt(shard_optimizer=True), transport=Transport(reduce_factors_at="inverses")
            )
        },
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_power_of_two_changes_nothing(comm, settings):
    """Oracle: the steps with the plain loss, to the last bit, while the scale grows."""
    states = []
    for scale in (None, scaler(growth_interval=2)):
        kfac = trainer(comm, network(), **settings)
        torch.manual_seed(5)
        for step in range(5):
            learn(kfac, step, scale, record=True)
        states.append(everything(kfac))
    assert scale.get_scale() == 2.0**12
    assert_equal(*states)


def test_sgd_takes_scaled_losses_as_kfac_does(comm):
    """Oracle: plain torch with an own scaler, overflows included; the scale at every step."""
    model, plain = network(), network()
    data = mpikfac.FirstOrderTrainer(model, problem.sgd_all(model), comm)
    optimizer, expected = problem.sgd_all(plain), scaler(growth_interval=2)
    found = scaler(growth_interval=2)
    for step in range(8):
        factor = math.inf if step in (2, 3, 6) else 1.0
        handle = model[4].weight.register_hook(lambda g, factor=factor: g * factor)
        learn(data, step, found)
        handle.remove()
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(batch(step)[0]), batch(step)[1])
        expected.scale(loss * factor).backward()
        expected.step(optimizer)
        expected.update()
        assert found.state_dict() == expected.state_dict()
        assert torch.equal(model[0].weight, plain[0].weight)
    assert data.steps == 8


@pytest.mark.parametrize("parts", [None, 2])
def test_parts_of_a_batch_are_scaled_together(comm, parts):
    """Oracle: the plain losses, to the last bit; a bad part costs the batch, and no more."""

    def run(trainer, scale, bad=None):
        for step in range(3):
            images, labels = batch(step)
            for number, part in enumerate((slice(0, 6), slice(6, 12))):
                trainer.optimizer.zero_grad()
                factor = math.inf if (step, number) == bad else 1.0
                loss = F.cross_entropy(trainer.model(images[part] * factor), labels[part])
                (scale.scale(loss) if scale else loss).backward()
                trainer.accumulate()
            before = everything(trainer)
            trainer.step(scale)
            if bad and step == bad[0]:
                running = {n: v for n, v in everything(trainer).items() if "running" not in n}
                assert_equal(running, {n: v for n, v in before.items() if "running" not in n})
        return everything(trainer)

    def made():
        if parts:
            return trainer(
                comm,
                network(),
                strategy=Strategy(MemOpt(), transport=Transport(virtual_ranks=2)),
                factor_update_steps=1,
            )
        model = network()
        return mpikfac.FirstOrderTrainer(
            model,
            problem.sgd_all(model),
            comm,
            Strategy(MemOpt(), transport=Transport(virtual_ranks=2)),
        )

    expected = run(made(), None)
    assert_equal(run(made(), scaler()), expected)
    scale = scaler()
    run(made(), scale, bad=(1, 0))
    assert scale.get_scale() == 2.0**9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_a_skipped_batch_leaves_all_as_it_was(comm, bad, at):
    """Oracle: the state before; then the run without the skipped batch, to the last bit."""
    settings = {"factor_update_steps": 1, "inv_update_steps": 1}
    kfac, without = (trainer(comm, network(), **settings) for _ in range(2))
    scale, other = scaler(), scaler()
    for step in range(4):
        if step == at:
            before = everything(kfac)
            kfac.votes[:3] = torch.tensor([1.0, 0.0, 2.0])
            learn(kfac, 9, scale, spoil=lambda images: images * bad)
            assert kfac.votes.tolist()[:8] == [1.0, 0.0, 2.0] + 5 * [0.0]
            assert_equal(everything(kfac), before)
        learn(kfac, step, scale)
        learn(without, step, other)
    assert (scale.get_scale(), other.get_scale()) == (2.0**9, 2.0**10)
    assert_equal(everything(kfac), everything(without))
    assert (kfac.steps, without.steps) == (5, 4)
    assert not kfac.nonfinite.counts


def test_a_scale_whose_square_overflows_is_reduced(comm):
    """Oracle: gradients alone would fit in float32; the run with a small scale, to the last bit."""
    kfac, without = (
        trainer(comm, network(), factor_update_steps=1, inv_update_steps=1) for _ in range(2)
    )
    large = scaler(2.0**80)
    while kfac.steps < 30:
        learn(kfac, 0, large)
    taken = 30 - round(80 - math.log2(large.get_scale()))
    assert 10 < taken < 30
    for _ in range(taken):
        learn(without, 0, scaler(2.0))
    assert_equal(everything(kfac), everything(without))


def test_float16_learns(comm):
    """Oracle: the losses of the same steps in float32, to 0.06; the first scale overflows."""
    histories = []
    for half in (False, True):
        kfac, scale, losses = trainer(comm, network()), scaler(2.0**24), []
        while len(losses) < 6:
            images, labels = batch(0)
            kfac.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = mean_loss(kfac.model(images), labels)
            before = scale.get_scale()
            scale.scale(loss).backward()
            kfac.step(scale)
            if scale.get_scale() == before:
                losses.append(loss.item())
        assert (kfac.steps > 6) == half
        histories.append(losses)
    assert histories[1] == pytest.approx(histories[0], abs=0.06)
    assert histories[0][-1] < histories[0][0] / 2


def test_a_scaler_that_is_not_enabled_changes_nothing(comm):
    """Oracle: the run without a scaler: a layer is left out, the remaining layers move."""
    states = []
    for scale in (None, scaler(enabled=False)):
        kfac = trainer(comm, network())
        learn(kfac, 0)
        kfac.model[4].weight.register_hook(lambda g: g * math.nan)
        learn(kfac, 1, scale)
        states.append(everything(kfac))
    assert_equal(*states)


@pytest.mark.parametrize("kind", [mpikfac.KFAC, mpikfac.FirstOrderTrainer])
def test_a_scale_is_taken_out_once(comm, kind):
    """Oracle: the line; the next step, as the line says, is taken."""
    model, scale = network(), scaler()
    one = kind(model, problem.sgd_all(model), comm)
    images, labels = batch(0)
    scale.scale(F.cross_entropy(model(images), labels)).backward()
    scale.unscale_(one.optimizer)
    with pytest.raises(ValueError, match=r"leave out scaler.unscale_, and clip with step\(max"):
        one.step(scale)
    scale.update()
    one.clear_statistics()
    learn(one, 1, scale)
    assert one.steps == 1


def test_scaled_gradients_cannot_be_sent_early(comm):
    """Oracle: the message; nothing has been sent."""
    kfac = trainer(comm, network(), strategy=Strategy(MemOpt(), transport=Transport(overlap=True)))
    with pytest.raises(ValueError, match=r"step\(scaler\) needs transport.overlap=False"):
        kfac.step(scaler())


def average(kfac, step, scale=None, spoil=None):
    """Take a step of a program that averages gradients, as `DistributedDataParallel` does."""
    images, labels = batch(step)
    kfac.optimizer.zero_grad()
    loss = F.cross_entropy(kfac.model(spoil(images) if spoil else images), labels)
    if scale is None:
        loss.backward()
        kfac.precondition()
        kfac.optimizer.step()
        return
    scale.scale(loss).backward()
    scale.unscale_(kfac.optimizer)
    kfac.precondition(scale)
    scale.step(kfac.optimizer)
    scale.update()


@pytest.mark.parametrize("preconditioner", ["inverse", "ekfac", "eva"])
def test_averaged_gradients_of_a_scaled_loss(comm, preconditioner):
    """Oracle: the run without scale, as the scale is a power of two; overflow skips the batch."""
    settings = {"preconditioner": preconditioner, "factor_update_steps": 1, "inv_update_steps": 2}
    plain, kfac = (trainer(comm, network(), **settings) for _ in range(2))
    scale = scaler()
    for step in range(4):
        average(plain, step)
        average(kfac, step, scale)
    assert_equal(everything(kfac), everything(plain))
    before = everything(kfac)
    average(kfac, 4, scale, spoil=lambda images: images * math.inf)
    assert_equal(everything(kfac), before)
    assert (kfac.steps, scale.get_scale()) == (5, 2.0**9)


def test_averaged_gradients_are_wrong_without_their_scale(comm):
    """Oracle: the same program's result without scale; hence the scaler is needed."""
    plain, kfac = (trainer(comm, network(), factor_update_steps=1) for _ in range(2))
    average(plain, 0)
    images, labels = batch(0)
    scale = scaler()
    scale.scale(F.cross_entropy(kfac.model(images), labels)).backward()
    scale.unscale_(kfac.optimizer)
    kfac.precondition()
    scale.step(kfac.optimizer)
    found, expected = problem.state(kfac.model), problem.state(plain.model)
    assert (found - expected).abs().max() > 1e-3


def test_an_input_that_changes_in_place_counts_as_the_layer_saw_the_input(comm):
    """Oracle: the same pass with a copy; autograd keeps a rounded copy, and so does not object."""
    found = []
    for same in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6))
        kfac = trainer(comm, model)
        x = torch.randn(8, 6)
        with BFLOAT16:
            loss = model(x if same else x.clone()).float().square().mean()
        x.mul_(10)
        loss.backward()
        kfac.step()
        found.append(factors(kfac))
    torch.testing.assert_close(*found, rtol=0, atol=0)
