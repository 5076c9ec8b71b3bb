"""Every kind of Fisher, in the factors of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac.numerics import fisher, triangles
from support import inside, oracles, problem

LOSSES = {
    "cross-entropy": lambda f: F.cross_entropy(f, torch.zeros(len(f)).long()),
    "squared-error": lambda f: F.mse_loss(f, torch.zeros_like(f)),
    "logistic": lambda f: F.binary_cross_entropy_with_logits(f, torch.zeros_like(f)),
}


def linear_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 3)).double()


def tanh_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3)).double()


def inputs():
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).double()


def step(comm, model, loss, **settings):
    """Return a step's factors; the step's gradients are of 3 times the loss with given labels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = problem.kfac(model, optimizer, comm, **settings)
    outputs = model(inputs())
    kfac.record(outputs, loss)
    (3 * LOSSES[loss](outputs)).backward()
    kfac.precondition()
    kfac.detach()
    return {
        name: triangles.unfold_triangle(packed) for name, packed in inside.factors(kfac).items()
    }


def blocks(model, loss):
    """Return every layer's generalised Gauss-Newton matrix: the mean of J^T H J, by autograd."""
    x = inputs()
    outputs = model(x)
    hessian = torch.autograd.functional.hessian(LOSSES[loss], outputs.detach())
    found = {}
    for name, module in oracles.kfac_modules(model).items():
        parameters = [p for p in (module.weight, module.bias) if p is not None]
        rows = []
        for output in outputs.reshape(-1):
            gradients = torch.autograd.grad(output, parameters, retain_graph=True)
            rows.append(torch.cat([g.reshape(len(g), -1) for g in gradients], 1).reshape(-1))
        jacobian = torch.stack(rows)
        matrix = hessian.reshape(len(jacobian), len(jacobian))
        found[name] = jacobian.T @ matrix @ jacobian
    return found


def test_in_deep_linear_nets_all_labels_give_the_gauss_newton_matrix(comm):
    """Oracle: J^T H J by autograd; exact, because the squared error has a constant Hessian."""
    model = linear_net()
    found = step(comm, model, "squared-error", fisher_type="type-2")
    for name, block in blocks(model, "squared-error").items():
        product = torch.kron(found[f"{name}.G"], found[f"{name}.A"])
        torch.testing.assert_close(product, block, rtol=1e-10, atol=1e-10)


def test_where_hessians_differ_the_product_is_not_the_gauss_newton_matrix(comm):
    """Oracle: J^T H J by autograd. A mean of products is not the product of means."""
    model = linear_net()
    found = step(comm, model, "cross-entropy", fisher_type="type-2")
    for name, block in blocks(model, "cross-entropy").items():
        product = torch.kron(found[f"{name}.G"], found[f"{name}.A"])
        assert 0.01 < (product - block).norm() / block.norm() < 1


@pytest.mark.gate
@pytest.mark.parametrize("loss", fisher.LOSSES)
@pytest.mark.parametrize("samples", [1, 3])
def test_drawn_labels_give_on_average_what_all_labels_give(comm, loss, samples):
    """Oracle: fisher_type="type-2", within six standard errors; A is the same at every draw."""
    expected = step(comm, tanh_net(), loss, fisher_type="type-2")
    draws = []
    for seed in range(100):
        model = tanh_net()
        torch.manual_seed(seed)
        draws.append(step(comm, model, loss, fisher_type="mc", mc_samples=samples))
    for name, factor in expected.items():
        drawn = torch.stack([draw[name] for draw in draws])
        error = drawn.std(0) / len(draws) ** 0.5 + 1e-12
        assert ((drawn.mean(0) - factor).abs() < 6 * error).all(), name
        assert (drawn.std(0).max() < 1e-12) == (name in ("0.A", "3.A"))


@pytest.mark.parametrize("chosen", ["mc", "type-2"])
def test_gradients_stay_those_of_the_loss(comm, chosen):
    """Oracle: autograd without K-FAC."""
    model = tanh_net()
    (3 * LOSSES["cross-entropy"](model(inputs()))).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kfac = problem.kfac(
        model, torch.optim.SGD(model.parameters(), lr=0.1), comm, fisher_type=chosen
    )
    outputs = model(inputs())
    kfac.record(outputs)
    (3 * LOSSES["cross-entropy"](outputs)).backward()
    for parameter, gradient in zip(model.parameters(), expected):
        assert torch.equal(parameter.grad, gradient)


def test_normalisations_take_all_labels_too(comm):
    """Oracle: the mean of J^T H J of scale and shift, by autograd, unit by unit."""
    model = tanh_net()
    covers = {**mpikfac.KINDS, **mpikfac.NORMS}
    found = step(comm, model, "cross-entropy", fisher_type="type-2", covers=covers)["2.A"]
    outputs = model(inputs())
    hessian = torch.autograd.functional.hessian(LOSSES["cross-entropy"], outputs.detach())
    rows = [
        torch.stack(torch.autograd.grad(o, [model[2].weight, model[2].bias], retain_graph=True), 1)
        for o in outputs.reshape(-1)
    ]
    jacobian = torch.stack(rows)  # [outputs, units, 2]
    matrix = hessian.reshape(len(rows), len(rows))
    expected = torch.einsum("oui,op,puj->uij", jacobian, matrix, jacobian)
    torch.testing.assert_close(found, expected)


def test_forward_only_has_no_output_factors(comm):
    """Oracle: (A + damping I)^-1 from the right."""
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"damping": 0.1, "kl_clip": None}
    kfac = problem.kfac(model, optimizer, comm, fisher_type="forward-only", **settings)
    LOSSES["cross-entropy"](model(inputs())).backward()
    gradient = oracles.gradient_matrix(model[0])
    kfac.precondition()
    a = torch.cat([inputs(), torch.ones(7, 1)], 1).double()
    damped = a.T @ a / 7 + 0.1 * torch.eye(5).double()
    expected = torch.linalg.solve(damped, gradient.T).T
    torch.testing.assert_close(oracles.gradient_matrix(model[0]), expected)
    assert list(kfac.plan.factors) == ["0.A", "1.A", "2.A"]


@pytest.mark.parametrize("settings", [{"fisher_type": "true"}, {"mc_samples": 0}])
def test_what_is_no_fisher_is_refused(comm, settings):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        step(comm, linear_net(), "cross-entropy", **settings)


@pytest.mark.parametrize("chosen", ["mc", "type-2"])
def test_vectors_have_no_mean_at_the_models_own_labels(comm, chosen):
    with pytest.raises(ValueError, match=f"needs fisher_type='empirical' or .* not {chosen!r}"):
        step(comm, linear_net(), "cross-entropy", fisher_type=chosen, preconditioner="eva")


def test_without_a_record_there_are_no_statistics(comm):
    kfac = problem.kfac(
        model := linear_net(), torch.optim.SGD(model.parameters(), lr=0.1), comm, fisher_type="mc"
    )
    LOSSES["cross-entropy"](model(inputs())).backward()
    with pytest.raises(RuntimeError, match=r"call record\(outputs\) before the loss's backward"):
        kfac.step()


@pytest.mark.parametrize("chosen", ["empirical", "type-2"])
@pytest.mark.parametrize("normalization", ["expand", "sc20", "kfac-pytorch"])
def test_micro_batches_that_are_recorded_add_up_to_the_joined_batch(comm, chosen, normalization):
    """Oracle: the batch in one pass; micro-batches are of 1, 4 and 2 examples."""
    covers = {**mpikfac.KINDS, **mpikfac.NORMS}
    found = []
    for sizes in ((7,), (1, 4, 2)):
        model = tanh_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        choices = {"fisher_type": chosen, "normalization": normalization, "covers": covers}
        kfac = problem.kfac(model, optimizer, comm, **choices)
        for x in inputs().split(sizes):
            outputs = model(x)
            kfac.record(outputs)
            (LOSSES["cross-entropy"](outputs) * len(x) / 7).backward()
        kfac.precondition()
        found.append(inside.factors(kfac).flat)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loss", fisher.LOSSES)
def test_outputs_without_their_dimension_are_refused(comm, loss):
    model = linear_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = problem.kfac(model, optimizer, comm, fisher_type="mc")
    outputs = model(inputs())[:, 0]
    with pytest.raises(ValueError, match=r"outputs \[batch, outputs, ...\], not \[7\]"):
        kfac.record(outputs, loss)


# -- outputs in the forms that losses take ---------------------------------------------------------


class Words(torch.nn.Module):
    """A model of texts: words are mixed, and every word has outputs `[texts, words, outputs]`."""

    def __init__(self, outputs: int, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = torch.nn.Linear(4, 5).double(), torch.nn.Linear(5, outputs).double()
        self.mixes = mixes

    def forward(self, x):
        h = self.first(x).tanh()
        return self.head(h + h.mean(1, keepdim=True) if self.mixes else h)


def factors_at(make, loss="cross-entropy", outputs=3, mixes=True, parts=1, preconditioner="eigen"):
    """Return the averages after steps whose recorded outputs are `make(outputs)`."""
    model = Words(outputs, mixes)
    estimator = mpikfac.Estimator(fisher_type="mc", mc_samples=2, subsample=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = mpikfac.world()
    kfac = mpikfac.KFAC(
        model, optimizer, comm, damping=0.03, estimator=estimator, preconditioner=preconditioner
    )
    for x in torch.randn(2, 8, 10, 4).double():
        for part in x.chunk(parts):
            torch.manual_seed(1)
            kfac.record(make(model(part)), loss)
            model(part).square().mean().backward()
        kfac.precondition()
    return {
        **dict(inside.factors(kfac)),
        **(inside.scales(kfac) if preconditioner == "ekfac" else {}),
    }


@pytest.mark.parametrize(
    ("loss", "outputs"), [("cross-entropy", 3), ("squared-error", 1), ("logistic", 1)]
)
@pytest.mark.parametrize(("preconditioner", "parts"), [("eigen", 1), ("eigen", 4), ("ekfac", 1)])
def test_rows_of_words_count_as_positions(loss, outputs, preconditioner, parts):
    """Oracle: the same outputs as positions; both forms draw the same labels."""
    found = factors_at(lambda out: out.flatten(0, 1), loss, outputs, True, parts, preconditioner)
    expected = factors_at(
        lambda out: out.transpose(1, 2), loss, outputs, True, parts, preconditioner
    )
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-14)


def test_words_that_a_mask_leaves_out_do_not_count():
    """Oracle: the first words as positions, as if the texts had no others."""
    mask = torch.zeros(8, 10, dtype=torch.bool)
    mask[:, :4] = True
    found = factors_at(lambda out: out[mask], mixes=False)
    expected = factors_at(lambda out: out[:, :4].transpose(1, 2), mixes=False)
    for name in ("first.G", "head.G"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-14)


def test_all_labels_of_rows_of_words_are_refused():
    """Oracle: the line; nothing has been recorded."""
    model = Words(3, True)
    kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), 0.1), None, fisher_type="type-2")
    out = model(torch.randn(8, 10, 4).double())
    with pytest.raises(ValueError, match="got 80 rows, and layer 'head' saw 8 examples; "):
        kfac.record(out.flatten(0, 1))
    assert not inside.statistics(kfac).flat.any()


def trainer_of(**settings):
    return problem.kfac(
        model := linear_net(), torch.optim.SGD(model.parameters(), 0.1), None, **settings
    )


OTHER_FACTORS = {
    "forward-only": {"fisher_type": "forward-only"},
    "one side": {"rule": lambda layer: dataclasses.replace(layer, sides="A")},
    "blocks": {"rule": lambda layer: dataclasses.replace(layer, largest=2)},
}


@pytest.mark.parametrize("saved", OTHER_FACTORS)
def test_a_state_without_a_layers_factors_is_refused_by_its_reason(comm, saved):
    """Oracle: the line; a state with more sides than needed is taken."""
    first, second = trainer_of(**OTHER_FACTORS[saved]), trainer_of()
    for kfac in (first, second):
        LOSSES["cross-entropy"](kfac.model(inputs())).backward()
        kfac.step()
    told = "is missing; its layer was frozen, or had different factors, .* use the same fisher_type"
    with pytest.raises(mpikfac.UserError, match=told):
        second.load_state_dict(first.state_dict())
    if saved != "blocks":
        first.load_state_dict(second.state_dict())


# -- several heads ---------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """A trunk, a head of classes and a head of values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 5)
        self.actor, self.critic = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.actor(h), self.critic(h)


TWO = ["cross-entropy", "squared-error"]


def of_heads(chosen, taken, mc_samples=1, rows=7):
    """Return the factors of a step at the labels of the taken heads."""
    model = ActorCritic().double()
    settings = {"fisher_type": chosen, "mc_samples": mc_samples}
    kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), 0.1), None, **settings)
    actor, critic = model(inputs())
    torch.manual_seed(3)
    kfac.record([[actor, critic][head] for head in taken], [TWO[head] for head in taken])
    (actor.square().mean() + critic.square().mean()).backward()
    kfac.precondition()
    return {name: triangles.unfold_triangle(t) for name, t in inside.factors(kfac).items()}


def test_heads_that_are_recorded_together_add_up():
    """Oracle: G of each head alone; the trunk's G is the sum."""
    both, *alone = (of_heads("type-2", taken) for taken in ((0, 1), (0,), (1,)))
    torch.testing.assert_close(both["trunk.G"], alone[0]["trunk.G"] + alone[1]["trunk.G"])
    for head, name in enumerate(("actor", "critic")):
        for side in "AG":
            torch.testing.assert_close(both[f"{name}.{side}"], alone[head][f"{name}.{side}"])


@pytest.mark.gate
def test_drawn_labels_of_heads_are_independent():
    """Oracle: all labels at once; the mean of 4,000 draws, whose cross terms vanish."""
    exact, drawn = of_heads("type-2", (0, 1)), of_heads("mc", (0, 1), mc_samples=4000)
    for name in exact:
        torch.testing.assert_close(drawn[name], exact[name], rtol=0.15, atol=0.02)


def test_a_second_record_and_uneven_heads_are_refused_with_the_remedy():
    """Oracle: the lines."""
    kfac = problem.kfac(
        model := ActorCritic().double(),
        torch.optim.SGD(model.parameters(), 0.1),
        None,
        fisher_type="mc",
    )
    actor, critic = model(inputs())
    with pytest.raises(ValueError, match=r"has 1 losses, and heads with \[7, 7\] rows"):
        kfac.record([actor, critic], ["cross-entropy"])
    with pytest.raises(ValueError, match=r"has 2 losses, and heads with \[7, 6\] rows"):
        kfac.record([actor, critic[1:]], TWO)
    kfac.record(actor)
    with pytest.raises(RuntimeError, match="pass the outputs of all heads to a single record"):
        kfac.record(critic, "squared-error")
