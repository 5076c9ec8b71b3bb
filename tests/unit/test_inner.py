"""Attention and recurrent cells have the directions of equivalent linear layers."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpikfac
from support import inner, inside, problem

SETTINGS = {"damping": 0.05, "inv_update_steps": 2, "kl_clip": None}
KINDS = [*inner.TO, *inner.CELLS]
CASES = [
    *((kind, bias, False) for kind, bias in itertools.product(KINDS, (True, False))),
    *((kind, kind != "apart", True) for kind in inner.TO),
]
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def train(comm, network, steps=4, call=None, **settings):
    """Train on a network's pair of batches; return all numbers of the network."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    kfac = problem.kfac(
        network, optimizer, comm, **{**SETTINGS, "preconditioner": "eigen", **settings}
    )
    for step in range(steps):
        images, labels = problem.batch(step)
        optimizer.zero_grad()
        for part, answers in zip(images.split(6), labels.split(6)):  # accumulated
            outputs = (network if call is None else call)(part)
            torch.manual_seed(step)
            kfac.record(outputs)
            (F.cross_entropy(outputs, answers) / 2).backward()
        kfac.step()
    kfac.close()
    kfac.detach()
    return inner.weights(network)


def assert_alike(comm, case, **settings):
    one, two = (train(comm, network, **settings) for network in inner.pair(*case))
    torch.testing.assert_close(one, two, **CLOSE)
    assert (one - inner.weights(inner.pair(*case)[0])).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES, ids=str)
def test_directions_are_those_of_linear_layers(comm, case):
    """Oracle: the same network of linear layers; accumulated gradients."""
    assert_alike(comm, case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"preconditioner": "inverse"},
        {"preconditioner": "ekfac", "inv_update_steps": 3},
        {"preconditioner": "eigen", "fisher_type": "mc"},
        {"preconditioner": "eigen", "fisher_type": "type-2"},
        {"preconditioner": "eigen", "normalization": "sc20"},
        {"preconditioner": problem.UNSPLIT, "fisher_type": "forward-only"},
    ],
    ids=str,
)
def test_other_estimators(comm, kind, settings):
    """Oracle: the same network of linear layers."""
    assert_alike(comm, (kind,), **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "form",
    [
        {"diagonal": "A"},
        {"diagonal": "G"},
        {"largest": 3},
        {"kfac_approx": "reduce"},
        {"sides": "A", "kfac_approx": "reduce"},
        {"rank": 2},
    ],
    ids=str,
)
def test_other_forms_of_factors(comm, kind, form):
    """Oracle: the same network of linear layers."""

    def rule(layer):
        return layer if layer.sides == "G" else replace(layer, **form)

    assert_alike(comm, (kind,), rule=rule, damping=0.3)


@pytest.mark.parametrize("kind", ["others", "lstm"])
def test_means_of_vectors(comm, kind):
    """Oracle: factors of the same network of linear layers; bias of keys has no gradient."""
    found = []
    for network in inner.pair(kind, False):
        images, labels = problem.batch(0)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        kfac = problem.kfac(network, optimizer, comm, **SETTINGS, preconditioner="eva")
        F.cross_entropy(network(images), labels).backward()
        kfac.precondition()
        found.append(torch.cat([average.flatten() for average in inside.factors(kfac).values()]))
        kfac.detach()
    assert found[0].sort().values.allclose(found[1].sort().values, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(comm, kind, reentrant):
    """Oracle: the same network with kept activations."""

    def recomputed(images):
        given = images.requires_grad_()
        return checkpoint(network, given, use_reentrant=reentrant, determinism_check="none")

    expected = train(comm, inner.pair(kind)[0])
    network = inner.pair(kind)[0]
    torch.testing.assert_close(train(comm, network, call=recomputed), expected, **CLOSE)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["itself", "others", "gru"])
def test_compiled_models(comm, kind, backend):
    """Oracle: the same network without compilation."""
    torch.compiler.reset()
    expected = train(comm, inner.pair(kind)[0])
    network = inner.pair(kind)[0]
    older = problem.kfac(network, torch.optim.SGD(network.parameters(), lr=0.1), comm)
    compiled = torch.compile(network, backend=backend)
    torch.testing.assert_close(train(comm, network, call=compiled), expected, **CLOSE)
    older.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(comm, kind):
    """Oracle: the same network of linear layers; products in bfloat16 round differently."""
    found = []
    for network in inner.pair(kind):
        network.float()

        def call(images, network=network):
            with torch.autocast("cpu", torch.bfloat16):
                return network(images.float())

        found.append(train(comm, network, call=call, damping=1.0))
    start = inner.weights(inner.pair(kind)[0]).float()
    assert (found[0] - found[1]).norm() < 0.03 * (found[0] - start).norm()


@pytest.mark.parametrize("kind", ["others", "sizes", "lstm"])
@pytest.mark.parametrize("preconditioner", ["eigen", "ekfac", "eva"])
def test_a_scaled_loss(comm, kind, preconditioner):
    """Oracle: the same step without a scale."""
    found = []
    for scaled in (False, True):
        network, _ = inner.pair(kind)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        kfac = problem.kfac(network, optimizer, comm, **SETTINGS, preconditioner=preconditioner)
        for step in range(2):
            images, labels = problem.batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images), labels)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
            (scaler.scale(loss) if scaler else loss).backward()
            kfac.step(scaler)
        kfac.detach()
        found.append(inner.weights(network))
    torch.testing.assert_close(*found, **CLOSE)


def test_a_single_example_may_lack_the_batch(comm):
    """Oracle: the same example as a batch of one."""
    found = []
    for batch in (True, False):
        torch.manual_seed(0)
        attention, cell = nn.MultiheadAttention(4, 2), nn.GRUCell(4, 4)
        model = nn.ModuleList([attention, cell]).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfac = problem.kfac(model, optimizer, comm, **SETTINGS)
        x, other = torch.randn(3, 4).double(), torch.randn(5, 4).double()
        if batch:
            y = attention(x[:, None], other[:, None], other[:, None])[0][-1]
            y = cell(y, y)[0]
        else:
            y = attention(x, other, other)[0][-1]
            y = cell(y, y)
        y.square().sum().backward()
        kfac.precondition()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        kfac.detach()
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("kind", inner.CELLS)
def test_a_direction_solves_the_dense_fisher(comm, kind):
    """Oracle: a dense solve with autograd's gradient of the only example, in a single call."""
    torch.manual_seed(0)
    cell = inner.CELLS[kind](3, 2).double()
    x, h = torch.randn(1, 3).double(), torch.randn(1, 2).double()
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    kfac = problem.kfac(cell, optimizer, comm, preconditioner="eigen", damping=0.1, kl_clip=None)
    y = cell(x, (h, h)) if kind == "lstm" else cell(x, h)
    (y[0] if kind == "lstm" else y).square().sum().backward()
    expected = []
    for side in ("ih", "hh"):
        own = [getattr(cell, f"{name}_{side}") for name in ("weight", "bias")]
        g = torch.cat([own[0].grad, own[1].grad[:, None]], 1)
        fisher = torch.outer(g.flatten(), g.flatten()) + 0.1 * torch.eye(g.numel()).double()
        expected.append(torch.linalg.solve(fisher, g.flatten()).view_as(g))
    kfac.precondition()
    for side, direction in zip(("ih", "hh"), expected):
        found = getattr(cell, f"weight_{side}").grad, getattr(cell, f"bias_{side}").grad[:, None]
        torch.testing.assert_close(torch.cat(found, 1), direction)


def test_weights_of_an_attention_may_be_asked_for_and_evaluation_takes_the_fast_path(comm):
    """Oracle: the attention alone, without K-FAC."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    plain, x = copy.deepcopy(layer), torch.randn(2, 3, 4)
    kfac = problem.kfac(layer, torch.optim.SGD(layer.parameters(), lr=0.1), comm)
    y, shares = layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)
    expected = plain.self_attn(x, x, x, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close((y, shares), expected)
    (y.square().sum() + shares.square().sum()).backward()  # the weights have a gradient, too
    kfac.precondition()
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), plain.eval()(x))
    kfac.detach()
    assert layer.self_attn._compiled_call_impl is None


def test_copies_and_saved_models_compute_with_weights_of_their_own(comm):
    """Oracle: the model without K-FAC, with other weights."""
    model = nn.Sequential(nn.RNNCell(3, 3))
    kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    x = torch.randn(2, 3)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.ones_(copied[0].weight_ih)
        plain = nn.RNNCell(3, 3)
        plain.load_state_dict(copied[0].state_dict())
        torch.testing.assert_close(copied(x), plain(x))
    kfac.detach()


def test_a_graph_without_the_product_is_refused_by_name(comm):
    """Oracle: a forward pass of another kind."""
    model = nn.RNNCell(3, 3)
    model.forward = lambda x: x @ (2 * model.weight_hh)
    _kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
    with pytest.raises(TypeError, match="layer '[ih]h': autograd's graph contains no product"):
        model(torch.randn(2, 3))


def test_frozen_weights_are_left_out():
    """Oracle: the layers by hand."""
    attention, cell = nn.MultiheadAttention(4, 2, kdim=3), nn.GRUCell(2, 2)
    model = nn.ModuleDict({"attends": attention, "cell": cell})
    names = [f"attends.{part}_proj" for part in ("q", "k", "v", "in", "out")]
    layers, _ = mpikfac.layers.cover(model)
    assert [layer.name for layer in layers] == [*names, "cell.ih", "cell.hh"]
    attention.k_proj_weight.requires_grad_(False)
    cell.weight_hh.requires_grad_(False)
    layers, others = mpikfac.layers.cover(model)
    assert [layer.name for layer in layers] == [names[0], names[2], names[4], "cell.ih"]
    assert [other.name for other in others] == ["attends.in_proj_bias", "cell.bias_hh"]


class OfSeries(nn.Module):
    """An attention or a cell over a series of vectors, and a linear layer."""

    def __init__(self, cell):
        super().__init__()
        self.inner = nn.LSTMCell(8, 8) if cell else nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.last(self.inner(x, x, x, need_weights=False)[0])
        state = None
        for step in range(x.shape[1]):
            state = self.inner(x[:, step], state)
        return self.last(state[0])


@pytest.mark.parametrize("cell", [False, True])
def test_an_empty_batch_counts_nothing(comm, cell):
    """Oracle: the factors of the batch before."""
    model = OfSeries(cell).double()
    kfac = problem.kfac(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, **SETTINGS)
    model(torch.randn(4, 5, 8).double()).square().sum().backward()
    kfac.step()
    before = {name: average.clone() for name, average in inside.factors(kfac).items()}
    kfac.optimizer.zero_grad()
    model(torch.randn(0, 5, 8).double()).square().sum().backward()
    kfac.step()
    assert all(torch.equal(inside.factors(kfac)[name], kept) for name, kept in before.items())
