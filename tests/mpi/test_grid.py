from __future__ import annotations

from functools import partial

import pytest
import torch

import mpikfac
from mpikfac import HybridOpt, MemOpt, Strategy, UserError, make_plan
from mpikfac.comm import Grid, agree, agreement, together
from mpikfac.comm.messages import collectives as primitives
from mpikfac.plan import Message
from support import problem
from support.strategies import assigned

RANKS = mpikfac.world().size


def bounds(*counts):
    """Return the bounds of segments with the given numbers of elements."""
    return [sum(counts[:k]) for k in range(len(counts) + 1)]


def numbers(rank, size):
    """Return a rank's contribution; sums of contributions are exact."""
    return torch.arange(size).double() * (rank + 1) + rank


@pytest.fixture(params=[None, 3], ids=["whole", "in pieces"])
def pieces(request, monkeypatch):
    """Send messages whole, or in pieces like large reductions and messages of 2^31 elements."""
    if request.param:
        monkeypatch.setattr(primitives, "MAX_COUNT", request.param)
        monkeypatch.setattr(primitives, "PIECE", request.param)


def sent(primitive, over, spans, root=-1):
    """Return a message; the numbers of bytes do not matter."""
    return Message("stage", primitive, over, tuple(spans), root, 0, 0, 0)


def sum_everywhere(grid, flat):
    grid.exchange([sent("Allreduce", "world", [(0, len(flat))])], flat)


def sum_to_owners(grid, flat, edges, primitive):
    spans = list(zip(edges, edges[1:]))
    if primitive != "Reduce":
        grid.exchange([sent(primitive, "world", spans)], flat)
    else:
        grid.exchange([sent(primitive, "world", [s], root) for root, s in enumerate(spans)], flat)


def gather(grid, flat, edges, over, primitive):
    spans = list(zip(edges, edges[1:]))
    if primitive == "Allgatherv":
        grid.exchange([sent(primitive, over, spans)], flat)
    else:
        grid.exchange([sent(primitive, over, [s], root) for root, s in enumerate(spans)], flat)


def uneven(size):
    """Return segment lengths, with an empty segment among several."""
    return [0 if k == 1 else 5 + 2 * k for k in range(size)]


@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
def test_ranks_sit_where_the_plan_says(comm, workers):
    """Oracle: the plan's positions; a column's ranks in order of rows and the reverse."""
    grid = Grid(comm, workers, mpikfac.Trace())
    plan = make_plan([], comm.size, Strategy(HybridOpt(grad_workers=workers)))
    row, column = plan.grid.position(comm.rank)
    assert (grid.column.rank, grid.row.rank) == (row, column)
    assert (grid.column.size, grid.row.size) == (workers, comm.size // workers)
    assert grid.world.rank == comm.rank


def test_a_sum_is_everywhere(comm, pieces):
    """Oracle: the sum in one process."""
    flat = numbers(comm.rank, 10)
    sum_everywhere(Grid(comm, 1, mpikfac.Trace()), flat)
    assert torch.equal(flat, sum(numbers(rank, 10) for rank in range(comm.size)))


@pytest.mark.parametrize("primitive", ["Reduce_scatter", "Alltoall", "Reduce"])
def test_owners_get_the_sum_of_their_segment(comm, pieces, primitive):
    """Oracle: the sum in one process, at the owner's place."""
    edges = bounds(*uneven(comm.size))
    flat = numbers(comm.rank, edges[-1])
    sum_to_owners(Grid(comm, 1, mpikfac.Trace()), flat, edges, primitive)
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    expected = sum(numbers(rank, edges[-1]) for rank in range(comm.size))
    assert torch.equal(flat[own], expected[own])


@pytest.mark.parametrize("most", [2**31 - 1, 8])
def test_owners_add_what_comes_by_alltoall_in_order_of_ranks(comm, monkeypatch, most):
    """Oracle: the same additions of float32 numbers in one process."""
    monkeypatch.setattr(primitives, "PIECE", 8)
    monkeypatch.setattr(primitives, "MAX_COUNT", most)
    edges = bounds(*uneven(comm.size))
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(comm.size, edges[-1], generator=generator, device="cpu")
    given = given.to(problem.DEVICE)
    flat = given[comm.rank].clone()
    sum_to_owners(Grid(comm, 1, mpikfac.Trace()), flat, edges, "Alltoall")
    own = slice(edges[comm.rank], edges[comm.rank + 1])
    expected = given[0].clone()
    for row in given[1:]:
        expected += row
    assert torch.equal(flat[own], expected[own])


@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
@pytest.mark.parametrize("over", ["world", "row", "column"])
@pytest.mark.parametrize("primitive", ["Allgatherv", "Bcast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_of_all_members_make_the_whole(comm, pieces, over, workers, primitive, dtype):
    """Oracle: segment k with member k's numbers."""
    grid = Grid(comm, workers, mpikfac.Trace())
    team = getattr(grid, over)
    edges = bounds(*uneven(team.size))
    flat = torch.full((edges[-1],), -1.0, dtype=dtype)
    flat[edges[team.rank] : edges[team.rank + 1]] = comm.rank
    gather(grid, flat, edges, over, primitive)
    filled = team.allgather(comm.rank)
    expected = [rank for rank, n in zip(filled, uneven(team.size)) for _ in range(n)]
    assert flat.tolist() == expected


@pytest.mark.parametrize(
    "choices", [{"shard_optimizer": True}, {"factor_reduction": "reduce_scatter"}], ids=str
)
@pytest.mark.parametrize("workers", mpikfac.plan.divisors(RANKS))
def test_training_in_pieces(comm, monkeypatch, workers, choices):
    """Oracle: the same training with whole messages; pieces may be summed in another order."""

    def trained():
        model = problem.network()
        strategy = Strategy(assigned(workers, comm.size, **choices))
        kfac = problem.kfac(model, problem.sgd(model), comm, strategy, **problem.SETTINGS)
        return problem.run(kfac, comm)

    whole = trained()
    for module in (agreement, primitives):
        monkeypatch.setattr(module, "MAX_COUNT", 500)
    monkeypatch.setattr(primitives, "PIECE", 500)
    torch.testing.assert_close(trained(), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("most", [2**31 - 1, 5])
def test_tensors_reach_all_ranks_whatever_their_memory(comm, monkeypatch, most):
    """Oracle: rank 0's numbers, and those of the first rank that holds a name."""
    monkeypatch.setattr(agreement, "MAX_COUNT", most)
    whole = torch.arange(6.0).view(2, 3) + comm.rank
    tensors = [whole.mT, whole[:, :1].expand(2, 4), whole[0, 0].clone(), whole[:0].bool()]
    expected = [tensor - (comm.rank if tensor.numel() else 0) for tensor in tensors[:3]]
    agreement.broadcast(comm, tensors)
    assert all(torch.equal(found, right) for found, right in zip(tensors, expected))
    held = {"number": 3} if comm.rank else {"tensor": whole[:, 1].bfloat16()}
    found = agreement.handed_over(comm, held, ["tensor", "number", "missing"])
    assert found["tensor"].tolist() == [1.0, 4.0]
    assert found.get("number") == (3 if comm.size > 1 else None)


REFUSED = [
    (torch.ones(4, dtype=torch.bfloat16), "torch.bfloat16 cannot be summed by MPI; use one of"),
    (torch.ones(4, dtype=torch.float16), "torch.float16 cannot be summed by MPI"),
    (torch.ones(4, dtype=torch.int64), "torch.int64 cannot be summed by MPI"),
    (torch.ones(8)[::2], r"strides \(2,\) is not contiguous; copy it first"),
    (torch.ones(2, 3).T, "is not contiguous"),
]


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
@pytest.mark.parametrize(("flat", "text"), REFUSED)
def test_what_mpi_would_take_for_bytes_is_refused_before_it_is_sent(comm, flat, text):
    grid = Grid(comm, 1, mpikfac.Trace())
    edges = bounds(*[flat.numel()] + [0] * (comm.size - 1))
    calls = [
        lambda: sum_everywhere(grid, flat),
        lambda: sum_to_owners(grid, flat, edges, "Reduce_scatter"),
    ]
    if flat.dtype != torch.bfloat16:  # bfloat16 is forwarded unchanged
        calls.append(lambda: gather(grid, flat, edges, "world", "Allgatherv"))
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call()
    assert not grid.trace.sent


def told(comm, call):
    """Return the error's text; check that all ranks have the same text."""
    with pytest.raises(UserError) as refused:
        call()
    (text,) = set(comm.allgather(str(refused.value)))
    return text


def test_together_everyone_learns_the_lowest_failing_ranks_text(comm):
    """Oracle: by hand; of several failures, every rank raises the lowest rank's failure."""

    def read(failing, kind=OSError):
        with together(comm, "reading data"):
            if comm.rank in failing:
                raise kind(f"rank {comm.rank} found nothing")
            return comm.rank

    last = comm.size - 1
    assert told(comm, lambda: read({0, last})) == "reading data: rank 0 found nothing"
    for kind in (ValueError, OSError, UserError):
        text = told(comm, partial(read, {last}, kind))
        assert text == f"reading data: rank {last} found nothing"
    assert read({}) == comm.rank


def test_agreement_names_the_first_key_that_differs(comm):
    """Oracle: by hand: rank 0's value and the first different value."""
    agree(comm, {"a": 1, "b": [1, "x"], "c": None})
    if comm.size == 1:
        return
    last = comm.size - 1
    text = told(comm, lambda: agree(comm, {"a": 1, "b": comm.rank // last, "c": comm.rank}))
    if comm.size == 2:
        assert text.startswith("ranks disagree on b: 0 on rank 0, 1 on rank 1; start all ranks")
    else:
        assert text.startswith("ranks disagree on c: 0 on rank 0, 1 on rank 1; start all ranks")
    missing = {"a": 1} | ({"extra": 2} if comm.rank == last else {})
    text = told(comm, lambda: agree(comm, missing))
    assert f"ranks disagree on extra: None on rank 0, 2 on rank {last}" in text


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("damping", lambda first: {"damping": 0.1 if first else 0.2}),
        ("damping", lambda first: {"damping": 0.1 if first else (lambda step: 0.1)}),
        ("factor_update_steps", lambda first: {"factor_update_steps": 1 + first}),
        ("inv_update_steps", lambda first: {"inv_update_steps": 1 + first}),
        ("factor_decay", lambda first: {"factor_decay": 0.9 if first else 0.8}),
        ("clip", lambda first: {"kl_clip": None if first else 0.001}),
        ("normalization", lambda first: {"normalization": "sc20" if first else "expand"}),
        ("initial_factor", lambda first: {"initial_factor": "first" if first else "identity"}),
        (
            "strategy",
            lambda first: {"strategy": Strategy(MemOpt(shard_optimizer=first))},
        ),
        ("plan", lambda first: {"preconditioner": "eigen" if first else "inverse"}),
        ("plan", lambda first: {"skip": ["5"] if first else []}),
    ],
)
def test_ranks_that_disagree_on_settings_all_stop(comm, key, given):
    """Oracle: the same text on every rank; the last rank differs."""
    model = problem.network()
    settings = given(comm.rank < comm.size - 1)
    text = told(comm, lambda: problem.kfac(model, problem.sgd(model), comm, **settings))
    assert text.startswith(f"ranks disagree on {key}: ")
    assert f"on rank {comm.size - 1}; start all ranks with the same code" in text


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("make", [mpikfac.KFAC, mpikfac.FirstOrderTrainer])
@pytest.mark.parametrize("difference", ["lr", "class", "parameters"])
def test_ranks_that_disagree_on_the_optimizer_all_stop(comm, make, difference):
    """Oracle: the same text on every rank; weights would part at the first step."""
    last = comm.rank == comm.size - 1
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    kind = torch.optim.Adam if last and difference == "class" else torch.optim.SGD
    parameters = list(model.parameters())
    if last and difference == "parameters":
        parameters.reverse()
    optimizer = kind(parameters, lr=0.2 if last and difference == "lr" else 0.1)
    text = told(comm, lambda: make(model, optimizer, comm))
    assert text.startswith("ranks disagree on optimizer")


@pytest.mark.skipif(RANKS == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("make", [mpikfac.KFAC, mpikfac.FirstOrderTrainer])
@pytest.mark.parametrize(
    ("difference", "name"), [("width", "0.weight"), ("dtype", "0.weight"), ("frozen", "0.bias")]
)
def test_ranks_that_disagree_on_the_model_all_stop(comm, make, difference, name):
    """Oracle: the same text on every rank, for any difference, with the first tensor's name."""
    last = comm.rank == comm.size - 1
    model = torch.nn.Sequential(torch.nn.Linear(3 + (last and difference == "width"), 2))
    if last and difference == "dtype":
        model.double()
    if last and difference == "frozen":
        model[0].bias.requires_grad_(False)
    text = told(comm, lambda: make(model, torch.optim.SGD(model.parameters(), lr=0.1), comm))
    assert text.startswith(f"ranks disagree on tensor {name!r}: ")
