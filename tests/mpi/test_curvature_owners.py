"""The curvature of a run is the same on several ranks as on one, and sends the planned bytes."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac.lab import (
    Curvature,
    Segment,
    influence,
    influence_memory,
    self_influence,
    source,
)
from mpikfac.lab.curvature.owners import (
    ANSWERS,
    COUNT,
    PUBLISH,
    QUERIES,
    SUMS,
    publish_messages,
    query_messages,
    sum_messages,
)
from support.curved import F64, losses, network, trained, vectors

pytestmark = pytest.mark.lab

EXACT = {"rtol": 1e-12, "atol": 1e-12}
STRATEGIES = {
    "mem-opt": mpikfac.Strategy(mpikfac.MemOpt()),
    "late": mpikfac.Strategy(transport=mpikfac.Transport(reduce_factors_at="inverses")),
    "comm-opt": None,
}


@pytest.fixture(params=STRATEGIES)
def saved(request, comm, tmp_path):
    """Return a trainer on all ranks, and the directory of its checkpoint, which all ranks share."""
    torch.manual_seed(comm.rank)
    kfac = trained(network(), comm, STRATEGIES[request.param])
    path = comm.bcast(str(tmp_path))
    mpikfac.save_checkpoint(comm, path, kfac.state_dict(), kfac.steps)
    return kfac, path


@pytest.fixture
def alone(comm):
    """Return a communicator of this rank alone."""
    own = comm.Split(comm.rank)
    yield own
    own.Free()


def functions(curvature, v):
    """Return results of all functions, as tensors by name."""
    solved = curvature.solve(v)
    roots = curvature.power(v, -0.5, 0.1)
    drawn = curvature.sample(10.0, 0.5, torch.Generator("cpu").manual_seed(3), 4)
    values = {layer: curvature.eigenvalues(layer) for layer in curvature.layers}
    numbers = [curvature.logdet(10.0, 0.5), curvature.trace(), *curvature.effective(3, 1).values()]
    return {
        **{f"solved {name}": t for name, t in solved.items()},
        **{f"roots {name}": t for name, t in roots.items()},
        **{f"drawn {name}": t for name, t in drawn.items()},
        **values,
        "quadratic": curvature.quadratic(v, 0.2),
        "numbers": torch.tensor(numbers, dtype=torch.float64),
    }


def test_ranks_share_the_layers(comm, alone, saved):
    """Oracle: a rank that loads the checkpoint alone, for vectors in other numbers on each rank.

    One rank has no vectors, and with more ranks than layers, ranks have no layers. All ranks load
    what the others wrote.
    """
    kfac, path = saved
    v = vectors(network(), (comm.rank + 1) % comm.size)
    expected = functions(Curvature.load(path, network(), alone), v)
    for curvature in (Curvature.load(path, network(), comm), Curvature.of(kfac)):
        found = functions(curvature, v)
        assert {*found} == {*expected}
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name], tensor, **EXACT, msg=lambda m, n=name: f"{n}: {m}"
            )
        curvature.close()


def test_messages_are_those_planned(comm, saved):
    """Oracle: the plan's bytes, for vectors in other numbers on each rank."""
    _, path = saved
    model, trace = network(), mpikfac.Trace()
    curvature = Curvature.load(path, model, comm, trace=trace)
    curvature.solve(vectors(model, comm.rank))
    curvature.logdet(1.0, 1.0)
    owners = curvature.owners
    planned = query_messages(owners.sizes, range(comm.size), comm.rank)
    numbers = owners.counts(dict.fromkeys(owners.shapes, ()))
    planned += publish_messages(numbers, comm.rank)
    for stage in (COUNT, QUERIES, ANSWERS, PUBLISH):
        assert trace.sent[stage] == sum(m.bytes for m in planned if m.stage == stage), stage
    assert sum(numbers) == len(curvature.layers)


def test_an_error_of_one_rank_ends_all(comm, saved):
    """Oracle: the same line on all ranks, also on those whose own layers are sound."""
    _, path = saved
    checkpoint = mpikfac.load_checkpoint(comm, f"{path}/step-000000003")
    items = {name: checkpoint[name] for name in checkpoint}
    items["kfac/factors/3.G"].fill_(torch.nan)
    mpikfac.save_checkpoint(comm, path, items, 4)
    with pytest.raises(mpikfac.UserError, match=r"factor '3\.G' contains NaN or infinity"):
        Curvature.load(path, network(), comm)


def test_influence_does_not_depend_on_the_ranks(comm, alone, saved):
    """Oracle: one rank with all examples and queries.

    Ranks have different numbers of examples and queries, one rank none.
    """
    _, path = saved
    counts = [(rank + 1) % comm.size + (comm.size == 1) for rank in range(comm.size)]
    torch.manual_seed(1)
    images, labels = torch.randn(sum(counts), 2, 3, 3, dtype=F64), torch.randint(3, (sum(counts),))
    own = images.split(counts)[comm.rank], labels.split(counts)[comm.rank]
    models = network().eval(), network().eval()
    one, several = (Curvature.load(path, m, c) for m, c in zip(models, (alone, comm)))
    expected = influence(one, losses, [(images, labels)], (images, labels))
    found = influence(several, losses, [own] if counts[comm.rank] else [], own)
    columns = expected.split(counts, 1)[comm.rank]
    torch.testing.assert_close(found, columns, **EXACT)
    along = source([Segment(one, 2.0, 0.1, 0.01)], losses, [(images, labels)], (images, labels))
    found = source([Segment(several, 2.0, 0.1, 0.01)], losses, [own], own)
    torch.testing.assert_close(found, along.split(counts, 1)[comm.rank], **EXACT)
    alone_with_all = self_influence(one, losses, [(images, labels)])
    own_part = self_influence(several, losses, [own])
    torch.testing.assert_close(own_part, alone_with_all.split(counts)[comm.rank], **EXACT)


def test_memory_is_planned_for_ranks_with_and_without_examples(comm, saved):
    """Oracle: the bytes of all eigenbases; the bytes of own and of all queries, by hand."""
    model = network().eval()
    curvature = Curvature.load(saved[1], model, comm)
    count, own = min(comm.rank, 1), comm.rank
    data = torch.randn(count, 2, 3, 3, dtype=F64), torch.randint(3, (count,))
    planned = influence_memory(curvature, losses, data, count, own)
    everyone = sum(range(comm.size))
    assert planned["influence"]["queries"] == 8 * 80 * (2 * own + everyone)
    bases = curvature.replicate().bases.values()
    sizes = [tensor.nbytes for basis in bases for tensor in basis.parts().values()]
    assert planned["self-influence"]["eigenbases"] == sum(sizes)
    assert (planned["self-influence"]["batch"] > 0) == (count > 0)


def outputs(model, batch):
    return model(batch)


@pytest.mark.parametrize("eigenvalues", ["squares", "products"])
def test_measuring_does_not_depend_on_the_ranks(comm, alone, eigenvalues):
    """Oracle: one rank with all examples; ranks have different numbers of them, one rank none.

    There are enough for factors of full rank, whose eigenvectors rounding does not change.

    The messages are those planned: sums to the owners, once for factors and once for squares.
    """
    torch.manual_seed(2)
    model, trace = network().eval(), mpikfac.Trace()
    counts = [24 * ((rank + 1) % comm.size + (comm.size == 1)) for rank in range(comm.size)]
    examples = torch.randn(sum(counts), 2, 3, 3, dtype=F64)
    own = examples.split(counts)[comm.rank]
    arguments = {"eigenvalues": eigenvalues}
    curvature = Curvature.measured(model, outputs, [examples], comm=alone, **arguments)
    found = Curvature.measured(
        model, outputs, own.split(7) if len(own) else [], comm=comm, trace=trace, **arguments
    )
    v = vectors(model, comm.rank)
    expected = functions(curvature, v)
    for name, tensor in functions(found, v).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-11)
    factors = {"0": 2 * (5**2 + 2**2) + 2, "3": 16**2 + 3**2 + 2, "5": 4**2 + 3**2 + 2}
    squares = {name: curvature.bases[name].values.numel() + 1 for name in curvature.layers}
    names = found.owners.names
    planned = sum(
        message.bytes
        for of_layer in (factors, squares)[: 1 + (eigenvalues == "squares")]
        for message in sum_messages([sum(of_layer[n] for n in own) for own in names], comm.rank)
    )
    assert trace.sent[SUMS] == planned * (comm.size > 1)


@pytest.mark.parametrize("eigenvalues", ["squares", "products"])
def test_samples_do_not_depend_on_the_ranks(comm, alone, eigenvalues):
    """Oracle: one rank with all examples, so few that rounding decides the bases of null spaces."""
    torch.manual_seed(2)
    model, examples = network().eval(), torch.randn(comm.size + 2, 2, 3, 3, dtype=F64)
    own = examples.tensor_split(comm.size)[comm.rank]
    drawn = [
        Curvature.measured(model, outputs, batches, comm=of, eigenvalues=eigenvalues).sample(
            10.0, 0.5, torch.Generator("cpu").manual_seed(3), 4
        )
        for batches, of in (([examples], alone), ([own], comm))
    ]
    torch.testing.assert_close(drawn[1], drawn[0], rtol=1e-11, atol=1e-11)


def test_measuring_fails_on_all_ranks(comm):
    """Oracle: the same line on all ranks if the batches of one rank have no outputs."""
    model = network().eval()
    batches = [torch.randn(2, 2, 3, 3, dtype=F64)]
    with pytest.raises(mpikfac.UserError, match="one row per example"):
        Curvature.measured(
            model, lambda m, x: m(x).sum(1) if comm.rank == 0 else m(x), batches, comm=comm
        )


def test_arguments_that_differ_are_refused(comm, saved):
    """Oracle: one line on all ranks, as if each passed its own number of examples."""
    curvature, generator = Curvature.load(saved[1], network(), comm), torch.Generator("cpu")
    calls = (
        lambda scale: curvature.logdet(scale, 1.0),
        lambda scale: curvature.effective(scale, 1.0),
        lambda scale: curvature.sample(scale, 1.0, generator),
    )
    for call in calls if comm.size > 1 else ():
        with pytest.raises(mpikfac.UserError, match="ranks disagree on scale: 1 on rank 0, 2 on"):
            call(comm.rank + 1)


def test_more_queries_than_a_message_are_refused(comm, saved, monkeypatch):
    """Oracle: one line on all ranks, also on those without queries; 80 elements are a query."""
    model = network().eval()
    curvature = Curvature.load(saved[1], model, comm)
    monkeypatch.setattr("mpikfac.lab.curvature.influence.MAX_COUNT", 80 * comm.size)
    count = comm.size + 1 if comm.rank == 0 else 0
    data = torch.randn(count, 2, 3, 3, dtype=F64), torch.randint(3, (count,))
    if comm.size > 1:
        with pytest.raises(mpikfac.UserError, match=f"pass at most {comm.size} at a time"):
            influence(curvature, losses, [], data)
