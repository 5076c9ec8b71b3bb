"""A run can stop, and resume with a different number of ranks and a different strategy."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac import (
    AdamGrafting,
    CommOpt,
    HybridOpt,
    MemOpt,
    Refresh,
    Strategy,
    Transport,
    UserError,
)
from support import inside, problem

RANKS = mpikfac.world().size
STOP = 2  # between two decompositions
ALL = problem.strategies(RANKS)
EXACT = problem.strategies(RANKS, ("allreduce", "reduce_scatter"))


def trainer(comm, strategy=None, optimizer=problem.sgd, **settings):
    model = problem.network()
    return problem.kfac(model, optimizer(model), comm, strategy, **problem.SETTINGS | settings)


def whole_state(comm, trainer):
    """Return all ranks' shares as one state; items of several ranks must be equal."""
    whole = {}
    for part in comm.allgather(trainer.state_dict()):
        for name, value in part.items():
            held = whole.setdefault(name, value)
            assert type(held) is type(value), name
            assert same(held, value), name
    return whole


def same(a, b):
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def interrupted(comm, strategy, optimizer=problem.sgd, **settings):
    """Return a run's state at STOP, and the run's end without a stop."""
    kfac = trainer(comm, strategy, optimizer, **settings)
    problem.run(kfac, comm, range(STOP))
    state = whole_state(comm, kfac)
    return state, problem.run(kfac, comm, range(STOP, problem.STEPS))


def continued(comm, state, strategy, optimizer=problem.sgd, **settings):
    kfac = trainer(comm, strategy, optimizer, **settings)
    kfac.load_state_dict(state)
    return problem.run(kfac, comm, range(STOP, problem.STEPS))


@pytest.mark.parametrize(("preconditioner", "kind"), [("eigen", "factors"), ("eva", "vectors")])
@pytest.mark.parametrize("strategy", ALL, ids=problem.label)
def test_the_same_strategy_goes_on_to_the_last_bit(comm, strategy, preconditioner, kind):
    """Oracle: the uninterrupted run."""
    optimizer = problem.sgd if strategy.assignment.colocate_factors else problem.adam
    state, expected = interrupted(comm, strategy, optimizer, preconditioner=preconditioner)
    assert torch.equal(
        continued(comm, state, strategy, optimizer, preconditioner=preconditioner), expected
    )
    factors = {name for name in state if name.startswith(("kfac/factors/", "kfac/vectors/"))}
    assert factors == {f"kfac/{kind}/{layer}.{side}" for layer in (0, 3, 5) for side in "AG"}


@pytest.mark.parametrize("reduce_at", ["factors", "inverses"])
@pytest.mark.parametrize("workers", sorted({1, RANKS}))
def test_averages_that_begin_at_the_identity_go_on(comm, workers, reduce_at):
    """Oracle: the uninterrupted run, and a run whose averages never move to the owners."""
    strategy, settings = (
        Strategy(HybridOpt(grad_workers=workers), transport=Transport(reduce_factors_at=reduce_at)),
        {"initial_factor": "identity"},
    )
    kfac = trainer(comm, strategy, **settings)
    unmoved = problem.run(kfac, comm)
    state, expected = interrupted(comm, strategy, **settings)
    assert torch.equal(continued(comm, state, strategy, **settings), expected)
    torch.testing.assert_close(expected, unmoved, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("grafting", problem.BY_ADAM, ids=problem.label)
@pytest.mark.parametrize("strategy", ALL[::3], ids=problem.label)
def test_lengths_of_adam_go_on_to_the_last_bit(comm, strategy, grafting):
    """Oracle: the uninterrupted run; without Adam's averages of squares, the end differs."""
    settings = {"grafting": grafting, "kl_clip": None}
    state, expected = interrupted(comm, strategy, **settings)
    assert torch.equal(continued(comm, state, strategy, **settings), expected)
    assert not trainer(comm, strategy, **settings).missing(state)
    for kind in ("kfac/graft/", *["kfac/rows/"] * grafting.normalize_rows):
        less = {name: value for name, value in state.items() if not name.startswith(kind)}
        assert not torch.equal(continued(comm, less, strategy, **settings), expected)


@pytest.mark.parametrize("strategy", ALL[::3], ids=problem.label)
def test_momenta_go_on_to_the_last_bit(comm, strategy):
    """Oracle: the uninterrupted run; without the momenta, the end differs."""
    settings = {"grafting": AdamGrafting(momentum=0.8), "kl_clip": None}
    state, expected = interrupted(comm, strategy, problem.plain_sgd, **settings)
    assert torch.equal(continued(comm, state, strategy, problem.plain_sgd, **settings), expected)
    assert not trainer(comm, strategy, problem.plain_sgd, **settings).missing(state)
    less = {name: value for name, value in state.items() if not name.startswith("kfac/momentum/")}
    assert not torch.equal(continued(comm, less, strategy, problem.plain_sgd, **settings), expected)


def test_all_ranks_miss_the_same(comm):
    """Oracle: rank 0; ranks without preconditioning also count grafting's items."""
    settings = {
        "grafting": AdamGrafting(orthogonalize=False),
        "kl_clip": None,
        "factor_update_steps": 1,
    }
    kfac = trainer(comm, Strategy(MemOpt(), refresh=Refresh(staleness=2)), **settings)
    problem.run(kfac, comm, range(4))
    names = whole_state(comm, kfac).keys()
    lost = {name for name in names if "graft/0" in name or "decompositions/5" in name}
    assert len(lost) >= 3
    for left in (names, names - lost, set()):
        missing = kfac.missing(left)
        assert all(missing == other for other in comm.allgather(missing))
    assert not kfac.missing(names)
    assert kfac.missing(names - lost) == lost


@pytest.mark.parametrize("preconditioner", ["eigen", "inverse", "eva"])
def test_any_strategy_goes_on_with_anothers_state(comm, preconditioner):
    """Oracle: the uninterrupted run, except for rounding. The next strategy resumes every run."""
    strategies = [s for s in EXACT if s.assignment.colocate_factors]
    for before, after in zip(strategies, [*strategies[1:], strategies[0]]):
        state, expected = interrupted(comm, before, preconditioner=preconditioner)
        found = continued(comm, state, after, preconditioner=preconditioner)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("stagger", "begun", "layers", "other"), [(3, 8, "0", 1), (3, 8, "0", 2), (2, 6, "05", 3)]
)
def test_a_share_on_its_way_is_used_where_shares_are_dealt_otherwise(
    comm, stagger, begun, layers, other
):
    """Oracle: on all ranks, the decompositions begun before the saved state, and due after it.

    In the resumed run, the layers belong to a different share, or to several shares.
    """

    def fresh(stagger):
        strategy = Strategy(CommOpt(), refresh=Refresh(staleness=1, stagger=stagger))
        return trainer(comm, strategy, factor_update_steps=1, inv_update_steps=12)

    first, second = fresh(stagger), fresh(other)
    problem.run(first, comm, range(begun + 1))
    state = whole_state(comm, first)
    second.load_state_dict(state)
    problem.run(second, comm, [begun + 1])
    for name, block in inside.bases(second).items():
        kind = "decompositions" if name[0] in layers else "bases"
        assert torch.equal(block, state[f"kfac/{kind}/{name}"]), name


@pytest.mark.parametrize("fewer", range(1, RANKS))
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)), problem.adam),
        (Strategy(MemOpt()), problem.sgd),
    ],
    ids=["owners", "everyone"],
)
def test_other_numbers_of_ranks_go_on(comm, fewer, strategy, optimizer):
    """Oracle: the uninterrupted run, on all ranks and on fewer, except for rounding."""
    team = comm.Split(comm.rank < fewer, comm.rank)
    state, expected = interrupted(comm, strategy, optimizer)
    if comm.rank < fewer:
        found = continued(team, state, strategy, optimizer)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        state, expected = interrupted(team, strategy, optimizer)
    state, expected = comm.bcast((state, expected))
    found = continued(comm, state, strategy, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_rank_that_owns_no_factor_goes_on_between_two_updates_of_factors(comm):
    """Oracle: the uninterrupted run, to the last bit; with 4 ranks, one rank has no layer."""
    strategy = Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
    first, second = trainer(comm, strategy), trainer(comm, strategy)
    problem.run(first, comm, range(3))
    second.load_state_dict(whole_state(comm, first))
    expected = problem.run(first, comm, [3])
    assert torch.equal(problem.run(second, comm, [3]), expected)


def test_a_first_order_runs_state_starts_kfac(comm):
    """Oracle: a single process with the same steps."""

    def run(team):
        model = problem.network()
        baseline = mpikfac.FirstOrderTrainer(model, problem.sgd(model), team)
        problem.run(baseline, team, range(2))
        kfac = trainer(
            team,
            Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)),
            factor_update_steps=100,
            inv_update_steps=100,
        )
        kfac.load_state_dict(whole_state(team, baseline))
        assert kfac.steps == 2
        return problem.run(kfac, team, range(2, 5))

    torch.testing.assert_close(run(comm), run(comm.Split(comm.rank)), rtol=0, atol=1e-10)


def without(name):
    """Return a change of a state that removes the item."""
    return lambda state: state.pop(name)


def replaced(name, value):
    """Return a change of a state that replaces the item."""
    return lambda state: state.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("trainer/steps"), "item 'trainer/steps' is missing; it must be a number"),
        (
            replaced("model/5.weight", torch.ones(5, 37)),
            "item 'model/5.weight' must be float64 [5, 36]; it is float32 [5, 37]",
        ),
        (
            without("kfac/bases/5.G.vectors"),
            "item 'kfac/bases/5.G.vectors' is missing; it must be float64 [5, 5]",
        ),
        (
            replaced("kfac/weights/0.A", "much"),
            "item 'kfac/weights/0.A' must be float64 [1]; it is a str",
        ),
    ],
    ids=["missing", "shape", "basis", "kind"],
)
def test_a_state_that_does_not_fit_on_one_rank_changes_nothing_on_any(comm, change, message):
    """Oracle: every rank's state before; the error names item, expected value and found value."""
    state, _ = interrupted(comm, None)
    kfac = trainer(comm)
    problem.run(kfac, comm, range(1))
    before = {k: v.clone() if torch.is_tensor(v) else v for k, v in kfac.state_dict().items()}
    if comm.rank == comm.size - 1:
        change(state)
    with pytest.raises(UserError) as refused:
        kfac.load_state_dict(state)
    assert str(refused.value).startswith(f"loading state: {message}")
    after = kfac.state_dict()
    assert after.keys() == before.keys()
    assert all(same(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["kfac", "sgd"])
def test_a_damaged_file_changes_nothing_on_any_rank(comm, tmp_path, kind):
    """Oracle: every rank's earlier weights; the file's name, even on ranks without need."""

    def fresh():
        if kind == "kfac":
            return trainer(
                comm, Strategy(MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True))
            )
        model = problem.network()
        return mpikfac.FirstOrderTrainer(model, problem.sgd(model), comm)

    first, second = fresh(), fresh()
    problem.run(first, comm, range(STOP))
    root = comm.bcast(tmp_path)
    path = mpikfac.save_checkpoint(comm, root, first.state_dict(), first.steps)
    damaged = path / f"shard-{comm.size - 1}.h5"
    comm.Barrier()
    if comm.rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    comm.Barrier()
    before = problem.state(second.model)
    with pytest.raises(UserError, match=f"loading state: {damaged} is damaged"):
        second.load_state_dict(mpikfac.load_checkpoint(comm, path))
    assert second.steps == 0
    assert torch.equal(problem.state(second.model), before)


def test_the_optimizers_state_keeps_the_layout_of_weights(comm):
    """Oracle: strides before the load; a norm rounds by the order of a tensor in memory."""
    first, second = (trainer(comm, optimizer=problem.adam) for _ in range(2))
    for one in (first, second):
        one.model.to(memory_format=torch.channels_last)
    problem.run(first, comm, range(2))
    second.load_state_dict({n: copied(v) for n, v in whole_state(comm, first).items()})
    pairs = zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True)
    for before, after in pairs:
        assert [v.stride() for v in after.values()] == [v.stride() for v in before.values()]


def copied(value):
    """Return a tensor as a checkpoint gives a tensor, with all numbers in order."""
    return value.clone(memory_format=torch.contiguous_format) if torch.is_tensor(value) else value


def test_a_batch_that_is_discarded_after_loading_leaves_what_was_loaded(comm):
    """Oracle: the saved running statistics."""
    first, second = trainer(comm), trainer(comm)
    norm = first.model[1]
    norm.running_mean += 1
    second.load_state_dict(whole_state(comm, first))
    second.clear_statistics()
    assert torch.equal(second.model[1].running_mean, norm.running_mean)
