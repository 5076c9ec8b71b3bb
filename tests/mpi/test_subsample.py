"""Factors from a subset of a large batch: which examples are used, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import MemOpt, Strategy, Transport
from mpikfac.numerics import triangles
from mpikfac.settings import usual_distance
from support import inside, problem

IMAGES = 192  # every shard is a multiple of 4 at 1, 2, 3 and 4 ranks
DISTANCES = {"0": 4, "3": 4, "5": 1}  # of the layers of `problem.network`, see the first test
PARTS = 12


@pytest.mark.parametrize(
    ("examples", "positions", "order", "distance"),
    [
        (192, 64, 18, 4),  # 32 examples are enough, 6 of 192 would be too far: 4
        (192, 9, 164, 2),  # 55 examples have 495 vectors, 3 for each of 164 rows
        (192, 1, 37, 1),  # 111 examples are needed
        (64, 1024, 27, 2),
        (60, 1024, 27, 1),
        (2048, 49, 4609, 4),  # 283 examples are needed
        (0, 1, 5, 1),
    ],
)
def test_the_distance_is_a_power_of_2_that_leaves_enough(examples, positions, order, distance):
    """Oracle: by hand."""
    for shares in (1, 4):
        share = examples // shares
        assert usual_distance(share, share * positions, shares, order) == distance


def test_uneven_shards_give_other_numbers_of_examples():
    """Oracle: the figures of the page, by hand: 13 of 200 and 2 of each 2, and 52 of 206."""

    def taken(examples, shares):
        return -(-examples // usual_distance(examples, examples, shares, 1))

    assert [taken(share, 4) for share in (200, 2, 2, 2)] == [13, 2, 2, 2]
    assert taken(206, 1) == 52


def whole_batch():
    """Return the images and labels of all ranks together."""
    found = [problem.batch(step) for step in range(IMAGES // problem.EXAMPLES)]
    return [torch.cat(tensors) for tensors in zip(*found)]


def factors(comm, strategy=None, parts=1, shard=None, **settings):
    """Return the factors after a step on the rank's shard of a large batch, by name."""
    model = problem.network()
    choices = problem.SETTINGS | {"preconditioner": "inverse"} | settings
    kfac = problem.kfac(model, problem.sgd(model), comm, strategy, **choices)
    number, count = shard or (comm.rank, comm.size)
    mine = (tensor.chunk(count)[number].chunk(parts) for tensor in whole_batch())
    for images, labels in zip(*mine):
        F.cross_entropy(model(images), labels).backward()
        if parts > 1:
            kfac.accumulate()
            model.zero_grad()
    kfac.step()
    found = dict(inside.factors(kfac))
    if not kfac.plan.forms[0].vector:
        found = {name: triangles.unfold_triangle(packed) for name, packed in found.items()}
    kfac.close()
    return found


def of_every(distance, comm, **settings):
    return factors(comm.Split(comm.rank), subsample=distance, **settings)


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(MemOpt(factor_reduction="reduce_scatter")), Strategy(MemOpt())],
)
def test_by_default_all_numbers_of_ranks_take_the_same_examples(comm, strategy):
    """Oracle: one process that takes every 4th example for convolutions, and all for the rest."""
    one = {distance: of_every(distance, comm) for distance in (1, 4)}
    assert not torch.allclose(one[1]["0.A"], one[4]["0.A"])  # or the choice would not be tested
    found = factors(comm, strategy)
    assert any(comm.allgather(bool(found)))
    for name, factor in found.items():
        expected = one[DISTANCES[name[0]]][name]
        torch.testing.assert_close(factor, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("every", [1, 8, 10, 34])
def test_all_positions_of_a_batch_of_windows_take_turns(comm, every):
    """Oracle: the positions, each with an input of its own; the distance is a power of 2."""
    windows, positions = 64, 8
    model = torch.nn.Sequential(torch.nn.Linear(positions, 2, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = mpikfac.KFAC(model, optimizer, comm, factor_update_steps=every, inv_update_steps=every)
    inputs = torch.eye(positions).double().repeat(windows, 1)
    for _ in range(40 * every):
        model(inputs).sum().backward()
        kfac.step()
    seen = triangles.unfold_triangle(inside.factors(kfac)["0.A"]).diagonal()
    assert seen.sum().item() == pytest.approx(1)
    assert (seen > 0.05).all()


def test_parts_of_a_batch_take_the_examples_of_the_batch(comm):
    """Oracle: one process with all parts, to the last bit."""
    strategy = Strategy(MemOpt(), transport=Transport(virtual_ranks=PARTS))
    found = factors(comm, strategy, PARTS // comm.size)
    expected = factors(comm.Split(comm.rank), strategy, PARTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_owner_alone_takes_enough_of_the_owners_own_batch(comm):
    """Oracle: one process whose whole batch is the rank's shard."""
    strategy = Strategy(MemOpt(factor_reduction="local"))
    found = factors(comm, strategy)
    expected = factors(comm.Split(comm.rank), shard=(comm.rank, comm.size))
    for name, factor in found.items():
        torch.testing.assert_close(factor, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("preconditioner", ["eva", "ekfac"])
def test_vectors_and_rescaled_bases_take_all_examples(comm, preconditioner):
    """Oracle: the same with every example, by number."""
    found, expected = (
        factors(comm, preconditioner=preconditioner),
        factors(comm, preconditioner=preconditioner, subsample=1),
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_diagonal_of_an_embedding_takes_all_examples(comm):
    """Oracle: the same with every example, by number; rare words need the whole batch."""

    def diagonal(subsample):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 3), torch.nn.Linear(3, 5)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        estimator = mpikfac.Estimator(subsample=subsample)
        kfac = mpikfac.KFAC(model, optimizer, comm, estimator=estimator)
        words = torch.randint(0, 50, (256, 8))
        model(words).square().mean().backward()
        kfac.step()
        return {n: inside.factors(kfac)[n].clone() for n in ("0.A", "0.G")}

    found, expected = diagonal(None), diagonal(1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
