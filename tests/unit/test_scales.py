"""EKFAC's scales, the second moments of examples' gradients in the eigenbases, and their use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import CommOpt, MemOpt, Refresh, Strategy, Transport
from mpikfac.numerics import products_of_values, squares_in_bases
from mpikfac.plan import count_of
from support import inside, oracles, problem

DAMPING = 0.02
SETTINGS = {
    **{
        "preconditioner": "ekfac",
        "damping": DAMPING,
        "factor_decay": 0.0,
        "kl_clip": None,
        "inv_update_steps": 100,
    },
    "covers": {**mpikfac.KINDS, **mpikfac.NORMS},
}
IMAGE, TOKENS = (4, 7, 7), (6, 4)
KINDS = {
    "linear": (lambda: nn.Linear(4, 5), (4,)),
    "linear without bias": (lambda: nn.Linear(4, 5, bias=False), (4,)),
    "linear with few positions": (lambda: nn.Linear(4, 5), (2, 4)),
    "linear with many positions": (lambda: nn.Linear(4, 3), TOKENS),
    "strided": (lambda: nn.Conv2d(4, 3, 3, stride=2, padding=1), IMAGE),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), IMAGE),
    "dilated": (lambda: nn.Conv2d(4, 3, 3, dilation=2), IMAGE),
    "same": (lambda: nn.Conv2d(4, 3, (2, 3), padding="same"), IMAGE),
    "circular": (lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "one position": (lambda: nn.Conv2d(4, 3, 7), IMAGE),
    "one dimension": (lambda: nn.Conv1d(6, 3, 3, stride=2), TOKENS),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), IMAGE),
    "transposed groups": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2, groups=2), TOKENS),
    "transposed, padded": (lambda: nn.ConvTranspose2d(4, 3, 3, 2, 1, output_padding=1), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(4), TOKENS),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE),
    "scale alone": (lambda: nn.RMSNorm(4), TOKENS),
    "one unit": (lambda: nn.LayerNorm(1), (4, 1)),
}
FORMS = {
    "diagonal A": {"diagonal": "A"},
    "diagonal": {"diagonal": "AG"},
    "blocks": {"largest": 2},
    "A alone": {"sides": "A"},
    "G alone": {"sides": "G"},
    "reduce": {"kfac_approx": "reduce"},
}


def network(kind):
    """Return a layer of the given kind, an activation and a linear layer; and nine inputs."""
    torch.manual_seed(0)
    make, size = KINDS[kind]
    x = torch.randn(9, *size).double()
    layer = make().double()
    head = nn.Linear(layer(x).flatten(1).shape[1], 3).double()
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), head), x


def trainer(comm, model, strategy=None, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return problem.kfac(model, optimizer, comm, strategy, **SETTINGS | settings)


def learn(kfac, x, labels, loss=F.cross_entropy):
    kfac.optimizer.zero_grad()
    loss(kfac.model(x), labels).backward()


def labels_of(x, seed=0):
    return torch.randint(0, 3, (len(x),), generator=torch.Generator().manual_seed(seed))


def matrix(layer, gradients):
    """Return the gradients of a layer's parameters as the layer's matrix, or a matrix per group."""
    found = gradients[0].new_zeros(layer.shape.gradient)
    for part, gradient in zip(layer.parts(found), gradients):
        part.copy_(layer.arranged(gradient))
    return found


def of_examples(layer, losses):
    """Return every loss's gradient of a layer, by autograd."""
    ways = {"retain_graph": True}
    return [matrix(layer, torch.autograd.grad(loss, layer.parameters, **ways)) for loss in losses]


def dense_bases(kfac, layer):
    """Return `Q_G (x) Q_A` of every group, written out."""
    groups, outputs, inputs = (1, *layer.shape.gradient)[-3:]
    whole = []
    for side, order in (("G", outputs), ("A", inputs)):
        blocks = [inside.bases(kfac)[f"{f.name}.vectors"] for f in layer.shape.side(side)]
        if not blocks:
            whole.append(torch.eye(order).double().expand(groups, -1, -1))
        elif side in layer.shape.diagonal:
            whole.append(torch.diag_embed(blocks[0].view(groups, order)))
        else:
            each = [block.reshape(groups, *block.shape[-2:]) for block in blocks]
            whole.append(torch.stack([torch.block_diag(*group) for group in zip(*each)]))
    return [torch.kron(g, a) for g, a in zip(*whole)]


def dense_direction(kfac, layer, gradient, examples, weight=None):
    """Return `(Q diag(S) Q^T + damping I)^-1 gradient`, S = mean square of examples' gradients."""
    weight = 1 / len(examples) if weight is None else weight
    found = []
    for group, q in enumerate(dense_bases(kfac, layer)):
        rows = torch.stack([e.reshape(len(dense_bases(kfac, layer)), -1)[group] for e in examples])
        square = weight * (rows @ q).square().sum(0)
        damped = q @ torch.diag(square) @ q.T + DAMPING * torch.eye(len(q)).double()
        of_group = gradient.reshape(-1, len(q))[group]
        found.append(torch.linalg.solve(damped, of_group))
    return torch.stack(found).view(layer.shape.gradient)


def assert_directions(kfac, examples, gradients, weight=None):
    for layer in inside.layers(kfac):
        found = matrix(layer, [p.grad for p in layer.parameters])
        of_layer = examples[layer.name]
        expected = dense_direction(kfac, layer, gradients[layer.name], of_layer, weight)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def step_in_bases(kfac, x):
    """Take a batch for bases and a second batch for scales; return the second batch's gradients."""
    learn(kfac, x, labels_of(x))
    kfac.precondition()
    x, labels = x.flip(0) * 1.5, labels_of(x, 1)
    with kfac.no_recording():
        losses = F.cross_entropy(kfac.model(x), labels, reduction="none")
    examples = {layer.name: of_examples(layer, losses) for layer in inside.layers(kfac)}
    learn(kfac, x, labels)
    kfac.precondition()
    return examples, {name: sum(each) / len(each) for name, each in examples.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_direction_is_that_of_the_exact_second_moment_in_the_basis(comm, kind):
    """Oracle: a dense solve with autograd's gradient of every example, rotated by Q_G (x) Q_A."""
    model, x = network(kind)
    kfac = trainer(comm, model)
    assert_directions(kfac, *step_in_bases(kfac, x))


class Attention(nn.Module):
    """Self-attention of tokens, and a linear layer of the tokens' mean."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_projections_of_an_attention(comm):
    """Oracle: the same dense solve."""
    torch.manual_seed(0)
    kfac = trainer(comm, Attention().double())
    assert [layer.name for layer in kfac.plan.layers][:2] == [
        "attention.in_proj",
        "attention.out_proj",
    ]
    assert_directions(kfac, *step_in_bases(kfac, torch.randn(9, *TOKENS).double()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["linear with few positions", "strided", "groups"])
def test_bases_of_any_form(comm, kind, form):
    """Oracle: the same dense solve; partial factors have a basis in blocks, or none."""
    model, x = network(kind)
    kfac = trainer(comm, model, rule=lambda layer: replace(layer, **FORMS[form]))
    assert_directions(kfac, *step_in_bases(kfac, x))


def test_a_bias_alone(comm):
    """Oracle: the same dense solve."""
    for kind in ("linear with many positions", "strided"):
        model, x = network(kind)
        model[0].weight.requires_grad_(False)
        kfac = trainer(comm, model)
        assert_directions(kfac, *step_in_bases(kfac, x))


@pytest.mark.parametrize("kind", ["linear with many positions", "strided", "groups", "layer norm"])
def test_examples_are_taken_a_few_at_a_time(comm, kind, monkeypatch):
    """Oracle: all at once."""
    found = []
    place = inside.PLACES["examples at a time"]
    for chunk in (getattr(*place), 1):
        monkeypatch.setattr(*place, chunk)
        model, x = network(kind)
        kfac = trainer(comm, model)
        step_in_bases(kfac, x)
        found.append(inside.scales(kfac).flat)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shared", [1, 3, 5, 8])
def test_either_vectors_or_matrices_are_rotated(shared):
    """Oracle: the definition, by einsum, with more and with fewer positions than either order."""
    torch.manual_seed(0)
    a, g = torch.randn(5, shared, 6).double(), torch.randn(5, shared, 4).double()
    q_a, q_g = torch.randn(6, 6).double(), torch.randn(4, 4).double()
    expected = torch.einsum("bto,oi,btj,jk->bik", g, q_g, a, q_a).square().sum(0)
    found = squares_in_bases(a, g, [q_a], [q_g])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_exact_labels(comm):
    """Oracle: a dense solve with the gradients of sqrt(p_c) times label c's log-probability."""
    model, x = network("strided")
    kfac = trainer(comm, model, fisher_type="type-2")
    for flip in (False, True):
        x = x.flip(0) * 1.5 if flip else x
        kfac.optimizer.zero_grad()
        outputs = model(x)
        kfac.record(outputs)
        F.cross_entropy(outputs, labels_of(x)).backward()
        gradients = {y.name: matrix(y, [p.grad for p in y.parameters]) for y in inside.layers(kfac)}
        kfac.precondition()
    with kfac.no_recording():
        logs = model(x).log_softmax(1)
    losses = (logs.detach().exp().sqrt() * logs).flatten()
    examples = {layer.name: of_examples(layer, losses) for layer in inside.layers(kfac)}
    assert_directions(kfac, examples, gradients, weight=1 / len(x))


def test_every_nth_example(comm):
    """Oracle: the dense solve with every third example, from 0.618 * 3, and all of the gradient."""
    model, x = network("strided")
    kfac = trainer(comm, model, subsample=3)
    examples, gradients = step_in_bases(kfac, x)
    assert_directions(kfac, {name: each[1::3] for name, each in examples.items()}, gradients)


def test_calls_of_one_pass_are_squared_apart(comm):
    """Oracle: a dense solve with every call's gradients, added up over calls."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    kfac, x = trainer(comm, model), torch.randn(9, 3).double()
    learn(kfac, x, labels_of(x))
    kfac.precondition()
    kfac.optimizer.zero_grad()
    inner = layer(x)
    outer = layer(torch.tanh(inner))
    loss = F.cross_entropy(outer, labels_of(x))
    seen = torch.autograd.grad(loss, [inner, outer])
    kfac.clear_statistics()
    learn(kfac, x, labels_of(x))
    gradients = {"0": matrix(inside.layers(kfac)[0], [p.grad for p in layer.parameters()])}
    calls = []
    for a, g in zip((x, torch.tanh(inner)), seen):
        a = torch.cat([a, torch.ones(len(a), 1).double()], 1).detach()
        calls += list(len(x) * g[:, :, None] * a[:, None, :])
    kfac.precondition()
    assert_directions(kfac, {"0": calls}, gradients, weight=1 / len(x))


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16])
def test_bases_made_anew_with_each_factor_leave_the_eigenvalues(comm, rounded_to):
    """Oracle: "eigen"; scales recorded in bases that are replaced at once have no effect."""
    ends = []
    for preconditioner in ("eigen", "ekfac", "ekfac"):
        model = problem.network()
        every = 2 if len(ends) < 2 else 4
        settings = problem.SETTINGS | {
            "preconditioner": preconditioner,
            "factor_update_steps": 2,
            "inv_update_steps": every,
        }
        settings["basis_dtype"] = rounded_to
        kfac = problem.kfac(model, problem.sgd(model), comm, **settings)
        ends.append(problem.run(kfac, comm))
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2], rtol=1e-6)


def independent(comm, **settings):
    """Return a trainer and a batch in which every input comes with every output gradient."""
    torch.manual_seed(0)
    x, c = torch.randn(5, 4).double(), torch.randn(3, 2).double()
    pairs = x.repeat_interleave(len(c), 0), c.repeat(len(x), 1)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    return trainer(comm, model, **settings), *pairs


def along(outputs, c):
    """Return a mean loss whose gradients at the outputs are `c`."""
    return (outputs * c).sum() / len(c)


def test_where_inputs_and_gradients_are_independent_scales_are_products(comm):
    """Oracle: the eigenvalues of the batch's own factors: E[g^2 a^2] = E[g^2] E[a^2]."""
    kfac, x, c = independent(comm)
    for _ in range(2):
        learn(kfac, x, c, along)
        kfac.precondition()
    products = torch.empty_like(inside.scales(kfac)["0"])
    products_of_values(*inside.decompositions(kfac).sides("0", "values"), out=products)
    torch.testing.assert_close(inside.scales(kfac)["0"], products, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("start", ["first", "identity"])
def test_batches_weigh_by_examples_and_age(comm, start):
    """Oracle: a weighted mean of products and of every batch's scales; factors weigh the same."""
    kfac, x, c = independent(comm, factor_decay=0.8, initial_factor=start)
    learn(kfac, x, c, along)
    kfac.precondition()
    expected, weight = inside.scales(kfac)["0"].clone(), inside.scale_weights(kfac)["0"].clone()
    assert torch.equal(weight, inside.weights(kfac)["0.A"])
    q_a, q_g = (inside.bases(kfac)[f"0.{side}.vectors"] for side in "AG")
    for count in (3, 7, 1):
        some_x, some_c = x[-count:] * count, c[-count:]
        learn(kfac, some_x, some_c, along)
        kfac.precondition()
        a = torch.cat([some_x, torch.ones(count, 1).double()], 1)
        batch = torch.einsum("bo,bi->boi", some_c @ q_g, a @ q_a).square().mean(0)
        parts = 0.8 * weight, 0.2 * count
        expected = (parts[0] * expected + parts[1] * batch) / sum(parts)
        weight = sum(parts)
        torch.testing.assert_close(inside.scales(kfac)["0"], expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(inside.scale_weights(kfac)["0"], inside.weights(kfac)["0.A"])
    torch.testing.assert_close(inside.scale_weights(kfac)["0"], weight)


@pytest.mark.parametrize("chosen", ["empirical", "type-2"])
def test_passes_of_one_step_are_one_batch(comm, chosen):
    """Oracle: the joined batch in one pass."""
    found = []
    for parts in (1, 3):
        model, x = network("strided")
        kfac = trainer(comm, model, fisher_type=chosen)
        for labels in (labels_of(x), labels_of(x, 1)):
            kfac.optimizer.zero_grad()
            for some_x, some in zip(x.chunk(parts), labels.chunk(parts)):
                outputs = model(some_x)
                kfac.record(outputs)
                (F.cross_entropy(outputs, some) / parts).backward()
            kfac.precondition()
        found.append(inside.scales(kfac).flat)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


def test_a_refresh_starts_anew_in_its_share_alone(comm):
    """Oracle: products of the new eigenvalues in the share, the old scales elsewhere.

    Scales of the share of two steps before contain the batch taken in between.
    """
    model = problem.network()
    settings = problem.SETTINGS | {
        "preconditioner": "ekfac",
        "factor_update_steps": 2,
        "inv_update_steps": 3,
    }
    kfac = problem.kfac(
        model, problem.sgd(model), comm, Strategy(MemOpt(), refresh=Refresh(stagger=3)), **settings
    )
    problem.run(kfac, comm, range(3))
    for step in range(3, 6, 2):  # no statistics, hence every change is new
        before = {name: one.clone() for name, one in inside.scales(kfac).items()}
        problem.run(kfac, comm, [step])
        share = inside.due(kfac, step)[2]
        for name, one in inside.scales(kfac).items():
            products = torch.empty_like(one)
            products_of_values(*inside.decompositions(kfac).sides(name, "values"), out=products)
            in_share = kfac.plan.turns_of[name] == share
            assert torch.equal(one, products if in_share else before[name]), name
            merged = kfac.plan.turns_of[name] == inside.due(kfac, step - 2)[2]
            assert torch.equal(one, products) != merged, name
        problem.run(kfac, comm, [step + 1])


def test_embeddings_keep_products(comm):
    """Oracle: the plan has no scales for embeddings; an embedding's step is the step of "eigen"."""
    found = {}
    for preconditioner in ("eigen", "ekfac"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)).double()
        kfac = trainer(comm, model, preconditioner=preconditioner)
        for seed in (1, 2):
            x = torch.randint(0, 5, (6, 2), generator=torch.Generator().manual_seed(seed))
            learn(kfac, x, labels_of(x))
            kfac.precondition()
        found[preconditioner] = [p.grad for p in model.parameters()]
    assert list(inside.scales(kfac)) == ["2"]
    assert torch.equal(found["ekfac"][0], found["eigen"][0])
    assert not torch.allclose(found["ekfac"][1], found["eigen"][1])


def test_relative_damping_is_in_units_of_the_factors(comm):
    """Oracle: directions with damping times the factors' unit."""
    model, x = network("strided")
    kfac = trainer(comm, model, relative_damping=True)
    examples, gradients = step_in_bases(kfac, x)
    for layer in inside.layers(kfac):
        values = [inside.bases(kfac)[f"{layer.name}.{side}.values"].mean() for side in "AG"]
        unit = values[0] * values[1]
        found = matrix(layer, [p.grad for p in layer.parameters]) * unit
        scaled = [example / unit.sqrt() for example in examples[layer.name]]
        expected = dense_direction(kfac, layer, gradients[layer.name], scaled)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("broken", [False, True])
def test_a_scaled_loss(comm, broken):
    """Oracle: the plain loss; a batch that overflows changes no scale."""
    found = []
    for scale in (None, 2.0**12):
        model, x = network("strided")
        kfac = trainer(comm, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for seed in range(3):
            if broken and seed == 1 and scale is None:
                continue
            kfac.optimizer.zero_grad()
            given = x * torch.inf if broken and seed == 1 else x
            scaler.scale(F.cross_entropy(model(given), labels_of(x, seed))).backward()
            kfac.step(scaler)
        found.append(torch.cat([inside.scales(kfac).flat, problem.state(model)]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


def test_sums_that_are_not_finite_count_for_nothing(comm, caplog):
    """Oracle: the scales before; the factors' own sums are finite."""
    model, x = network("linear")
    kfac = trainer(comm, model, factor_decay=0.8)
    learn(kfac, x, labels_of(x))
    kfac.step()
    before = inside.scales(kfac).flat.clone(), inside.scale_weights(kfac)["0"].clone()
    learn(kfac, x, labels_of(x))
    inside.scale_sums(kfac)["0"][0, 0] = torch.inf
    kfac.step()
    assert torch.equal(inside.scales(kfac)["0"].flatten(), before[0][:25])
    assert torch.equal(inside.scale_weights(kfac)["0"], 0.8 * before[1])
    assert kfac.nonfinite.counts["scales"] == 1
    assert "NaN or infinity in the scales of '0'; their averages do not change" in caplog.text
    assert not torch.equal(inside.scales(kfac).flat, before[0])


def test_a_layer_without_a_basis_records_nothing(comm, monkeypatch):
    """Oracle: the unchanged gradient, for longer than non-finite scales are tolerated; no count."""
    model, x = network("linear")
    kfac = trainer(comm, model)
    learn(kfac, x, labels_of(x))
    restart = getattr(*inside.PLACES["restart scales"])

    def with_nan(*given):
        inside.bases(kfac)["0.A.values"].fill_(torch.nan)
        restart(*given)

    monkeypatch.setattr(*inside.PLACES["restart scales"], with_nan)
    kfac.step()
    for _ in range(5):
        learn(kfac, x, labels_of(x))
        gradient = model[0].weight.grad.clone()
        kfac.precondition()
        assert torch.equal(model[0].weight.grad, gradient)
    assert kfac.nonfinite.counts["scales"] == 0


def test_forgotten_passes_leave_no_sums(comm):
    """Oracle: zeros, in the sums and the numbers of examples."""
    model, x = network("linear")
    kfac = trainer(comm, model)
    learn(kfac, x, labels_of(x))
    kfac.step()
    learn(kfac, x, labels_of(x))
    assert inside.scale_sums(kfac)["0"].abs().sum() > 0
    kfac.clear_statistics()
    assert not inside.scale_sums(kfac).flat.any()
    assert set(inside.scale_sums(kfac)) == {"0", "3", count_of("0"), count_of("3")}


def test_another_preconditioners_state_starts_anew(comm):
    """Oracle: the products of the next step's bases."""
    first, second = problem.network(), problem.network()
    settings = problem.SETTINGS | {"factor_update_steps": 1}
    eigen = problem.kfac(first, problem.sgd(first), comm, **settings)
    problem.run(eigen, comm, range(2))
    state = eigen.state_dict()
    kfac = problem.kfac(second, problem.sgd(second), comm, **settings | {"preconditioner": "ekfac"})
    kfac.load_state_dict(state)
    kinds = "scales", "scale-weights"
    assert kfac.missing(state) == {f"kfac/{kind}/{layer}" for kind in kinds for layer in "035"}
    problem.run(kfac, comm, [2])
    for name, found in inside.scales(kfac).items():
        products = torch.empty_like(found)
        products_of_values(*inside.decompositions(kfac).sides(name, "values"), out=products)
        assert torch.equal(found, products)
    assert not kfac.missing(kfac.state_dict())


def test_other_preconditioners_have_no_scales(comm):
    """Oracle: no memory, and no hook for scales."""
    model = problem.network()
    kfac = problem.kfac(model, problem.sgd(model), comm, **problem.SETTINGS)
    memory = kfac.plan.memory(0)
    assert (memory["scales"], memory["scale sums"]) == (0, 0)
    assert not inside.records_scales(kfac)


REFUSED = {
    "normalization": ({"normalization": "sc20"}, "needs normalization='expand', not 'sc20'"),
    "forward-only": ({"fisher_type": "forward-only"}, "not 'forward-only'"),
    "owners": (
        {"strategy": Strategy(CommOpt(factor_reduction="reduce_scatter"))},
        "assignment.factor_reduction='allreduce', not",
    ),
    "update": (
        {"strategy": Strategy(CommOpt(shard_optimizer=True))},
        "assignment.shard_optimizer=False, not",
    ),
    "workers": ({"strategy": Strategy(MemOpt())}, "needs grad_workers=2, not 1"),
    "late": (
        {"strategy": Strategy(CommOpt(), transport=Transport(reduce_factors_at="inverses"))},
        "transport.reduce_factors_at='factors', not",
    ),
    "parts": (
        {"strategy": Strategy(CommOpt(), transport=Transport(virtual_ranks=2))},
        "transport.virtual_ranks=None, not",
    ),
    "small": (
        {"strategy": Strategy(CommOpt(replicate_below=4))},
        "assignment.replicate_below=0, not",
    ),
    "overlap": (
        {"strategy": Strategy(CommOpt(), transport=Transport(overlap=True))},
        "transport.overlap=False, not",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(comm, case):
    """Oracle: a single line with the remedy."""
    given, message = dict(REFUSED[case][0]), REFUSED[case][1]
    strategy = given.pop("strategy", None)
    with pytest.raises(ValueError, match=message):
        if strategy:
            shapes = mpikfac.layers.covered_shapes(problem.network())
            mpikfac.make_plan(shapes[0], 2, strategy, shapes[1], "ekfac")
        else:
            trainer(comm, problem.network(), **given)


def test_scales_of_oracles_factors(comm):
    """Oracle: of linear layers, trace of scales = mean over examples of the gradient's square."""
    model, x = network("linear")
    kfac = trainer(comm, model)
    examples, _ = step_in_bases(kfac, x)
    for name in oracles.kfac_modules(model):
        expected = sum(example.square().sum() for example in examples[name]) / len(x)
        torch.testing.assert_close(inside.scales(kfac)[name].sum(), expected)
