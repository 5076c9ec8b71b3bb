"""Graph networks whose nodes are spread over ranks: sums over neighbours, gradients, training."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

import mpikfac
from mpikfac_apps.graphs import aggregates, data, networks, partitions
from mpikfac_apps.graphs.aggregates import Halo, sums_of
from mpikfac_apps.graphs.parts import inside, part_of
from mpikfac_apps.graphs.train import GraphOptions, GraphWork
from support.problem import DEVICE

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(
        "emulated" in sys.modules, reason="the emulated device has no sparse matrices"
    ),
]
PLANTED = data.Planted(nodes=60, communities=3, degree=5, inputs=4, noise=1.0)
OPTIONS = GraphOptions(planted=PLANTED, known=0.3, hidden=8, warmup=0, weight_decay=0.0)
STEPS = 6


@pytest.fixture(autouse=True)
def _doubles():
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(kind)


def work_of(comm, **changes):
    """Return the training with changed options, from the same first weights."""
    torch.manual_seed(0)
    return GraphWork(comm, dataclasses.replace(OPTIONS, **changes), DEVICE)


def trained(comm, steps=STEPS, **changes):
    """Return the mean losses of the steps, and the weights after the steps."""
    work = work_of(comm, **changes)
    return [mean_loss(comm, work.step(step)) for step in range(steps)], weights(work)


def mean_loss(comm, taken):
    total, count = mpikfac.comm.summed(comm, [float(taken.loss) * taken.examples, taken.examples])
    return total / count


def weights(work):
    return [
        parameter.detach().cpu().numpy().copy() for parameter in work.trainer.model.parameters()
    ]


def dense(model, edges, nodes):
    """Return the matrix of the sums over neighbours, by loops over edges."""
    near = np.zeros((nodes, nodes))
    for first, second in edges.T:
        near[first, second] = near[second, first] = 1
    if model == "sage":
        return near / np.maximum(1, near.sum(1, keepdims=True))
    near += np.eye(nodes)
    return near / np.sqrt(np.outer(near.sum(1), near.sum(0)))


def gathered(comm, owners, rows):
    """Return the rows of all nodes, in the order of nodes, from the rows of all ranks."""
    everyone = np.zeros((len(owners), *rows.shape[1:]))
    for rank, part in enumerate(comm.allgather(rows.detach().cpu().numpy())):
        everyone[owners == rank] = part
    return everyone


# -- sums over neighbours ----------------------------------------------------------------------


def replaced(name, owners, matrix, x):
    """Return the sums of an aggregate: numpy, with the means of ranks in the place of rows."""
    sums = np.zeros_like(x)
    for rank in range(owners.max() + 1):
        seen = x.copy()
        for other in range(owners.max() + 1):
            if name == "means" and other != rank:
                seen[owners == other] = x[owners == other].mean(0)
        sums[owners == rank] = (matrix @ seen)[owners == rank]
    return sums


@pytest.mark.parametrize("partition", ["contiguous", "greedy"])
@pytest.mark.parametrize("model", networks.KINDS)
@pytest.mark.parametrize("name", ["exact", "local", "means"])
def test_sums_are_products_with_a_dense_matrix(comm, name, model, partition):
    """Oracle: numpy with the dense matrix; gradients by central differences of the same numbers."""
    graph = data.planted(PLANTED, 0)
    nodes = len(graph.labels)
    owners = partitions.dealt(partition, graph, comm.size)
    own = owners == comm.rank
    edges = inside(graph.edges, owners) if name == "local" else graph.edges
    part = part_of(comm.rank, owners, networks.KINDS[model].weights(edges, nodes)).to(DEVICE)
    halo = Halo(mpikfac.comm.Group(comm, 0, mpikfac.Trace(), "world"), part, own.mean())
    aggregate = sums_of(name, halo, [4], 0, lambda: 0).first
    rows = torch.tensor(graph.features[own], device=DEVICE, requires_grad=True)
    found = aggregate(rows)
    matrix = dense(model, edges, nodes)
    expected = replaced(name, owners, matrix, graph.features)
    np.testing.assert_allclose(gathered(comm, owners, found), expected, rtol=1e-12, atol=1e-12)
    # A sum with weights over the rows of all ranks, in the unit of the rank.
    draws = np.random.default_rng(3)
    weight, direction = draws.normal(size=(2, *graph.features.shape))
    found.backward(torch.tensor(weight[own] / own.mean(), device=DEVICE))
    slope = (gathered(comm, owners, rows.grad * own.mean()) * direction).sum()
    sides = [replaced(name, owners, matrix, graph.features + h * direction) for h in (0.5, -0.5)]
    np.testing.assert_allclose(slope, (weight * (sides[0] - sides[1])).sum(), rtol=1e-10)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_rows_and_gradients_arrive_late(comm, delay):
    """Oracle: the step in which the row of a place was sent, from the definition."""
    graph = data.planted(PLANTED, 0)
    owners = partitions.dealt("contiguous", graph, comm.size)
    part = part_of(comm.rank, owners, networks.of_convolution(graph.edges, len(owners))).to(DEVICE)
    halo = Halo(mpikfac.comm.Group(comm, 0, mpikfac.Trace(), "world"), part, 1.0)
    step = 0
    late = aggregates.Late(halo, 1, delay, lambda: step)
    incoming = torch.cat([torch.arange(count) for count in part.counts_in])
    outgoing = torch.cat([torch.arange(count) for count in part.counts_out])
    for step in range(3 * delay + 2):
        sent = (100 * (step + 1) + outgoing[:, None]).double().to(DEVICE).requires_grad_()
        received = late(sent)
        np.testing.assert_array_equal(received[:, 0].detach().cpu(), as_late(incoming, step, delay))
        received.backward((100 * (step + 1) + incoming[:, None]).double().to(DEVICE))
        np.testing.assert_array_equal(sent.grad[:, 0].cpu(), as_late(outgoing, step, delay))


def as_late(places, step, delay):
    """Return the number at each place: 100 times the step of sending (from 1 on), and the place."""
    numbers = []
    for place in places.tolist():
        turns = [s for s in range(step + 1) if s % delay == place % delay]
        sent = [s for s in turns if turns and s <= turns[-1] - delay]
        numbers.append(100 * (sent[-1] + 1) + place if sent else 0)
    return np.array(numbers, float)


# -- trainings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["contiguous", "greedy"])
@pytest.mark.parametrize("model", networks.KINDS)
def test_a_step_is_that_of_dense_matrices(comm, model, partition):
    """Oracle: numpy: forward and backward by hand, with the dense matrix of all nodes."""
    work = work_of(comm, model=model, partition=partition, optimizer="sgd", lr=1.0, layers=2)
    work.trainer.optimizer.param_groups[0]["momentum"] = 0.0
    (w1, b1, w2, b2), graph = weights(work), data.planted(PLANTED, 0)
    matrix = dense(model, graph.edges, len(graph.labels))

    def joined(x):
        return np.hstack([x, matrix @ x]) if model == "sage" else matrix @ x

    first = joined(graph.features)
    hidden = first @ w1.T + b1
    second = joined(hidden * (hidden > 0))
    logits = second @ w2.T + b2
    known = data.split(graph, OPTIONS.known, 0)
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    loss = -np.log(scores[np.arange(len(known)), graph.labels])[known].mean()
    errors = (scores - np.eye(3)[graph.labels]) * known[:, None] / known.sum()
    back = errors @ w2
    turned = back[:, :8] + matrix.T @ back[:, 8:] if model == "sage" else matrix.T @ back
    inner = turned * (hidden > 0)
    found_loss = mean_loss(comm, work.step(0))
    np.testing.assert_allclose(found_loss, loss, rtol=1e-12)
    slopes = [inner.T @ first, inner.sum(0), errors.T @ second, errors.sum(0)]
    for new, old, slope in zip(weights(work), (w1, b1, w2, b2), slopes):
        np.testing.assert_allclose(old - new, slope, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
@pytest.mark.parametrize("partition", ["greedy", "contiguous"])
@pytest.mark.parametrize("model", networks.KINDS)
def test_any_number_of_ranks_trains_as_one(comm, model, partition, optimizer):
    """Oracle: the training on a single rank, to 12 digits."""
    chosen = {"model": model, "partition": partition, "optimizer": optimizer}
    losses, found = trained(comm, **chosen)
    alone = comm.Split(comm.rank, 0)
    expected_losses, expected = trained(alone, **chosen)
    alone.Free()
    assert expected_losses[-1] < expected_losses[0]
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for new, old in zip(found, expected):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-12 * np.abs(old).max())


def test_ranks_without_a_known_node_take_part(comm):
    """Oracle: the training on a single rank; two of 60 nodes are known."""
    losses, _ = trained(comm, known=0.02)
    alone = comm.Split(comm.rank, 0)
    expected, _ = trained(alone, known=0.02)
    alone.Free()
    np.testing.assert_allclose(losses, expected, rtol=1e-10)


def test_no_delay_is_exact(comm):
    """Oracle: the exact aggregate, to the last bit; with a delay, other numbers on ranks."""
    exact, found = trained(comm, aggregate="exact"), trained(comm, aggregate="delayed", delay=0)
    assert found[0] == exact[0] and all(map(np.array_equal, found[1], exact[1]))
    late = trained(comm, aggregate="delayed", delay=2)
    assert (late[0] == exact[0]) == (comm.size == 1)


@pytest.mark.parametrize("name", aggregates.AGGREGATES)
def test_bytes_are_those_of_the_counts(comm, name):
    """Oracle: rows that leave the rank, times layers, widths and both directions."""
    work = work_of(comm, aggregate=name, delay=2)
    work.trace.clear()
    for step in range(2):
        work.step(step)
    part = work.sums.halo.part
    steps = 2 if name != "delayed" else 1  # half of the rows in each of two steps
    for stage, counts in zip(aggregates.THERE, (part.counts_out, part.counts_in)):
        assert work.trace.sent[stage] == steps * sum(counts) * 2 * OPTIONS.hidden * 8
        assert name != "local" or stage not in work.trace.calls


@pytest.mark.parametrize("name", aggregates.AGGREGATES)
def test_a_loaded_state_goes_on(comm, name):
    """Oracle: the training without an end, to the last bit."""
    chosen = {"aggregate": name, "delay": 2}
    losses, expected = trained(comm, **chosen)
    first = work_of(comm, **chosen)
    for step in range(3):
        first.step(step)
    second = work_of(comm, **chosen)
    second.load(
        {
            k: torch.as_tensor(v).clone() if torch.is_tensor(v) else v
            for k, v in first.state().items()
        }
    )
    assert [mean_loss(comm, second.step(step)) for step in range(3, STEPS)] == losses[3:]
    assert all(map(np.array_equal, weights(second), expected))


def test_late_rows_of_other_ranks_begin_anew(comm, caplog):
    """Oracle: the names of the items; rows of 0, and a line in the log of rank 0."""
    work = work_of(comm, aggregate="delayed", delay=2)
    for step in range(4):
        work.step(step)
    other = {k.replace(f" of {comm.size}", " of 9"): v for k, v in work.state().items()}
    fresh = work_of(comm, aggregate="delayed", delay=2)
    fresh.load(other)
    assert not any(rows.any() for late in fresh.sums.late for _, rows in late.items())
    assert ("restart from 0" in caplog.text) == (comm.rank == 0)
    assert fresh.trainer.steps == 4
