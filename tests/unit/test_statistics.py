"""What hooks record in all kinds of passes, seen in the factors of a step."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpikfac import MemOpt, Strategy, Transport
from mpikfac.numerics import triangles
from support import inside, oracles, problem


def trainer(comm, model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return problem.kfac(model, optimizer, comm, **settings)


def factors(kfac):
    """Return A and G of every layer, or the vectors, as stored in the state."""
    prefix = "kfac/vectors/" if kfac.plan.forms[0].vector else "kfac/factors/"
    state = {n.removeprefix(prefix): t for n, t in kfac.state_dict().items() if prefix in n}
    if kfac.plan.forms[0].vector:
        return state
    return {name: triangles.unfold_triangle(packed) for name, packed in state.items()}


def learn(kfac, batch, loss=F.cross_entropy):
    images, labels = batch
    loss(kfac.model(images), labels).backward()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)


def tanh_network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 4), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(4, 5)).double()


def test_factors_are_means_over_examples(comm):
    """Oracle: an autograd call for every example, at the loss of the example alone."""
    model, (images, labels) = tanh_network(), problem.batch(0)
    expected = {}
    for image, label in zip(images, labels):
        outputs, x = {}, image[None]
        for name, module in model.named_children():
            inputs, x = x, module(x)
            if name in oracles.kfac_modules(model):
                outputs[name] = inputs.detach(), x
        gradients = torch.autograd.grad(
            F.cross_entropy(x, label[None]), [output for _, output in outputs.values()]
        )
        for (name, (inputs, output)), g in zip(outputs.items(), gradients):
            module = model[int(name)]
            a = oracles.input_vectors(module, inputs)
            g = oracles.output_vectors(g, output.shape[1])
            for factor, moment in ((f"{name}.A", a.T @ a / len(a)), (f"{name}.G", g.T @ g)):
                expected[factor] = expected.get(factor, 0) + moment / len(images)
    kfac = trainer(comm, model)
    learn(kfac, (images, labels))
    kfac.step()
    assert_same(factors(kfac), expected)


LINEAR_NETS = {
    "three linear layers": lambda: [nn.Linear(4, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 2)],
    "a convolution with one position": lambda: [
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(3, 4),
        nn.Linear(4, 2, bias=False),
    ],
}


@pytest.mark.parametrize("net", LINEAR_NETS)
def test_in_deep_linear_nets_the_product_is_the_gauss_newton_block(comm, net):
    """Oracle: the mean of J^T J over examples, by autograd, for half the squared error.

    Every example comes once for every output c, with the label off by sqrt(outputs) in c. The
    labels' second moments are the second moments of the model's own N(f(x), I): the Fisher has no
    sampling error.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*LINEAR_NETS[net]()).double()
    x = torch.randn(7, 4).double()
    x = x[:, :, None, None] if isinstance(model[0], nn.Conv2d) else x
    outputs = 2
    repeated = x.repeat_interleave(outputs, 0)
    noise = outputs**0.5 * torch.eye(outputs).double().repeat(len(x), 1)
    labels = model(repeated).detach() + noise

    kfac = trainer(comm, model)
    learn(kfac, (repeated, labels), lambda f, y: F.mse_loss(f, y, reduction="sum") / len(y) / 2)
    kfac.precondition()  # keeps the weights for the Jacobian
    found = factors(kfac)
    kfac.detach()
    for name, module in oracles.kfac_modules(model).items():
        parameters = [p for p in (module.weight, module.bias) if p is not None]
        rows = []
        for output in model(x).reshape(-1):
            gradients = torch.autograd.grad(output, parameters, retain_graph=True)
            rows.append(torch.cat([g.reshape(len(g), -1) for g in gradients], 1).reshape(-1))
        jacobian = torch.stack(rows)
        block = jacobian.T @ jacobian / len(x)
        product = torch.kron(found[f"{name}.G"], found[f"{name}.A"])
        torch.testing.assert_close(product, block, rtol=1e-10, atol=1e-10)


class Twice(nn.Module):
    """A layer called twice, behind and before in-place activations."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu_(self.shared(F.relu_(self.shared(x)))))


def vectors(examples=12, shape=(6,)):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(examples, *shape, generator=generator).double()
    return x, torch.randint(0, 5, (examples,), generator=generator)


PASSES = {
    "a layer called twice": (Twice, vectors()),
    "in-place ReLU": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 5)),
        vectors(),
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.AdaptiveAvgPool2d((1, 5)), nn.Flatten()),
        vectors(shape=(3, 6)),
    ),
    "a single layer": (lambda: nn.Linear(6, 5), vectors()),
    "convolutions": (problem.network, problem.batch(0)),
}


@pytest.mark.parametrize(("model", "batch"), PASSES.values(), ids=PASSES)
def test_vectors_are_means(comm, model, batch):
    """Oracle: the paper's means over examples, of all calls' vectors by im2col [Eva]."""
    torch.manual_seed(0)
    model = model().double()
    expected = oracles.vectors(model, batch)
    model.zero_grad()
    kfac = trainer(comm, model, preconditioner="eva")
    learn(kfac, batch)
    kfac.step()
    assert_same(factors(kfac), expected)


@pytest.mark.parametrize(("model", "batch"), PASSES.values(), ids=PASSES)
def test_factors_are_means_over_vectors(comm, model, batch):
    """Oracle: all calls' vectors one below the other, by im2col."""
    torch.manual_seed(0)
    model = model().double()
    expected = oracles.factors(model, batch)
    model.zero_grad()
    kfac = trainer(comm, model)
    learn(kfac, batch)
    kfac.step()
    assert_same(factors(kfac), expected)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv2d(2, 3, 3), nn.Flatten(-3), nn.Linear(3, 5)], (2, 3, 3)),
        ([nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)], (4,)),
    ],
)
def test_one_example_needs_no_batch_dimension(comm, layers, shape):
    """Oracle: the same example as a batch of one."""
    torch.manual_seed(0)
    model, x, label = nn.Sequential(*layers).double(), torch.randn(shape).double(), torch.tensor(1)
    expected = oracles.factors(model, (x[None], label[None]))
    model.zero_grad()
    kfac = trainer(comm, model)
    learn(kfac, (x, label))
    kfac.step()
    assert_same(factors(kfac), expected)


def test_behind_a_layer_batch_normalisation_leaves_no_mean_gradient(comm):
    """Oracle: the norm removes any constant added to a channel; hence the loss does not change."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)]
    kfac = trainer(comm, nn.Sequential(*layers).double(), preconditioner="eva", damping=0.5)
    learn(kfac, problem.batch(0))
    kfac.precondition()
    zero, head = factors(kfac)["0.G"], factors(kfac)["4.G"]
    assert zero.norm() < 1e-12 < head.norm()
    gradient, direction = (
        arena["0"] for arena in (inside.gradients(kfac), inside.directions(kfac))
    )
    torch.testing.assert_close(direction, kfac.kl_scale * gradient / 0.5)


@pytest.mark.parametrize("preconditioner", ["inverse", "eva"])
def test_micro_batches_add_up_to_the_joined_batch(comm, preconditioner):
    """Oracle: the joined batch in one pass; the loss of every micro-batch is divided by 3."""
    torch.manual_seed(0)
    x, y = vectors()
    joined, split = Twice().double(), Twice().double()
    split.load_state_dict(joined.state_dict())
    joined, split = (
        trainer(comm, model, preconditioner=preconditioner) for model in (joined, split)
    )
    learn(joined, (x, y))
    for micro_batch in zip(x.split((2, 4, 6)), y.split((2, 4, 6))):
        learn(split, micro_batch, lambda f, t: F.cross_entropy(f, t, reduction="sum") / len(x))
    joined.step()
    split.step()
    assert_same(factors(split), factors(joined))
    torch.testing.assert_close(problem.state(split.model), problem.state(joined.model))


@pytest.mark.parametrize("extra", ["no backward", "no grad", "inference", "eval"])
def test_only_training_passes_count(comm, extra):
    """Oracle: the same step without the extra pass, to the last bit."""

    def stepped(passes):
        model = problem.network()
        kfac = trainer(comm, model)
        if passes == "no backward":
            model(problem.batch(1)[0])
        elif passes == "no grad":
            with torch.no_grad():
                model(problem.batch(1)[0])
        elif passes == "inference":
            with torch.inference_mode():
                model(problem.batch(1)[0])
        elif passes == "eval":
            model.eval()
            learn(kfac, problem.batch(1))
            kfac.optimizer.zero_grad()
            model.train()
            model[1].eval()
        learn(kfac, problem.batch(0))
        kfac.step()
        return problem.state(kfac.model)

    assert torch.equal(stepped(extra), stepped(None))


def test_steps_between_statistics_record_nothing(comm):
    """Oracle: the factors of step 0, to the last bit, and 3 layers recorded once."""
    kfac = trainer(comm, problem.network(), factor_update_steps=3)
    problem.run(kfac, comm, [0])
    first = factors(kfac)
    problem.run(kfac, comm, [1, 2])
    assert all(torch.equal(first[name], found) for name, found in factors(kfac).items())
    assert kfac.trace.calls["statistics"] == 3


class Branches(nn.Module):
    """Two layers, of which a pass takes one or both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.taken = ["left", "right"]

    def forward(self, x):
        return sum(getattr(self, name)(x) for name in self.taken)


def test_a_layer_that_takes_no_part_keeps_its_average(comm):
    """Oracle: the identity before the layer's first batch; later, averages of own batches alone."""
    torch.manual_seed(0)
    model = Branches().double()
    kfac = trainer(comm, model, factor_decay=0.5, kl_clip=None)
    expected = {"left": [], "right": []}
    for step, taken in enumerate((["left"], ["left", "right"], ["right"])):
        model.taken = taken
        batch = vectors(examples=6 + 2 * step)
        for name, factor in oracles.factors(copy.deepcopy(model), batch).items():
            expected[name[:-2]] += [(name, factor, len(batch[0]))]
        kfac.optimizer.zero_grad()
        learn(kfac, batch)
        kfac.step()
        if step == 0:
            assert torch.equal(factors(kfac)["right.A"], torch.eye(7).double())
    for layer, terms in expected.items():
        for side in ("A", "G"):
            seen = [(factor, count) for name, factor, count in terms if name == f"{layer}.{side}"]
            first, second = seen
            weights = (0.5 * first[1], second[1])
            mean = (weights[0] * first[0] + weights[1] * second[0]) / sum(weights)
            assert_same({"": factors(kfac)[f"{layer}.{side}"]}, {"": mean})


def test_a_step_without_a_training_pass_is_refused(comm):
    kfac = trainer(comm, Twice().double())
    with pytest.raises(RuntimeError, match="no covered layer took part .* before this step"):
        kfac.step()


def test_a_skipped_layer_may_be_unused(comm):
    """Oracle: the step without the layer; the layer's parameters stay unchanged."""
    torch.manual_seed(0)
    model = Twice().double()
    model.unused = nn.Linear(3, 3).double()
    before = model.unused.weight.clone()
    kfac = trainer(comm, model, skip=["unused"])
    learn(kfac, vectors())
    kfac.step()
    assert torch.equal(model.unused.weight, before)
    assert not torch.equal(factors(kfac)["shared.A"], torch.zeros(7, 7))


def test_a_discarded_batch_leaves_no_trace(comm):
    """Oracle: the same step without the discarded batch, to the last bit."""

    def stepped(discards):
        kfac = trainer(comm, problem.network())
        if discards:
            learn(kfac, problem.batch(1))
            kfac.optimizer.zero_grad()
            kfac.clear_statistics()
        learn(kfac, problem.batch(0))
        kfac.step()
        return problem.state(kfac.model)

    assert torch.equal(stepped(True), stepped(False))


def test_discarded_parts_leave_no_trace(comm):
    """Oracle: the same step without the part that was discarded or loaded over, to the last bit."""

    def stepped(forget=None):
        kfac = trainer(
            comm,
            problem.network().train(),
            strategy=Strategy(MemOpt(), transport=Transport(virtual_ranks=2)),
        )
        state = copy.deepcopy(kfac.state_dict())
        for step in ([] if forget is None else [2]) + [0, 1]:
            kfac.optimizer.zero_grad()
            learn(kfac, problem.batch(step))
            kfac.accumulate()
            if step == 2:
                forget(kfac, state)
        kfac.step()
        return parameters_and_means(kfac.model)

    for forget in (
        lambda kfac, _: kfac.clear_statistics(),
        lambda kfac, state: kfac.load_state_dict(state),
    ):
        assert torch.equal(stepped(forget), stepped())


def test_running_statistics_go_back_to_those_after_a_step_of_the_callers(comm):
    """Oracle: the statistics after `precondition`, once a later batch is discarded."""
    kfac = trainer(comm, problem.network().train())
    learn(kfac, problem.batch(0))
    kfac.precondition()
    expected = parameters_and_means(kfac.model)
    learn(kfac, problem.batch(1))
    assert not torch.equal(parameters_and_means(kfac.model), expected)
    kfac.clear_statistics()
    assert torch.equal(parameters_and_means(kfac.model), expected)


def test_a_batch_that_is_on_its_way_is_not_discarded(comm):
    kfac = trainer(
        comm, problem.network(), strategy=Strategy(MemOpt(), transport=Transport(overlap=True))
    )
    with pytest.raises(
        ValueError, match="overlap=True the backward pass has already sent gradients; call step"
    ):
        kfac.clear_statistics()


def parameters_and_means(model):
    """Return a model's state without counts of batches, which K-FAC does not restore."""
    state = model.state_dict()
    return torch.cat([v.flatten() for name, v in state.items() if "num_batches" not in name])


def test_copies_of_a_model_record_nothing(comm):
    """Oracle: the original's factors, after a copy and a saved model have trained on other data."""
    kfac, alone = trainer(comm, problem.network()), trainer(comm, problem.network())
    file = io.BytesIO()
    torch.save(kfac.model, file)
    file.seek(0)
    for model in (copy.deepcopy(kfac.model), torch.load(file, weights_only=False)):
        images, labels = problem.batch(1)
        F.cross_entropy(model(images), labels).backward()
    for trained in (kfac, alone):
        learn(trained, problem.batch(0))
        trained.step()
    assert_same(factors(kfac), factors(alone))


def test_a_detached_model_records_nothing(comm):
    kfac = trainer(comm, problem.network())
    kfac.detach()
    learn(kfac, problem.batch(0))
    assert not inside.statistics(kfac).flat.any()


def test_inputs_by_name_count(comm):
    """Oracle: the same layer called with its input by position."""

    class Named(nn.Module):
        def __init__(self, by_name):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.by_name = nn.Linear(3, 2).double(), by_name

        def forward(self, x):
            return self.layer(input=x) if self.by_name else self.layer(x)

    found = [trainer(comm, Named(by_name)) for by_name in (True, False)]
    for kfac in found:
        learn(kfac, (torch.ones(4, 3).double(), torch.tensor([0, 1, 1, 0])))
        kfac.step()
    assert_same(factors(found[0]), factors(found[1]))


def test_a_second_backward_pass_is_refused(comm):
    """Oracle: the message; G of two passes would lack the cross term of the joined loss."""
    kfac = trainer(comm, nn.Sequential(nn.Linear(3, 2)))
    loss = kfac.model(torch.ones(4, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="layer '0': a second backward pass"):
        loss.backward()
