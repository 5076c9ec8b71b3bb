"""Merged messages, factors that all ranks decompose, and the chosen strategy."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpikfac
from mpikfac import CommOpt, HybridOpt, LayerShape, Strategy, Transport, make_plan
from mpikfac.preconditioners import forms
from mpikfac.predict import Job, Level, Machine, Network, tuning

LAYERS = [LayerShape(f"layer{n}", 64 * 2**n, 32 * 2**n) for n in range(4)]
MACHINE = Machine(
    name="made up",
    inside=Level(1e-3, 1e7),
    networks=(Network("net", 32, 1.0, 1.5, 0.5, 0.3, 0.2, 0.1),),
    decompositions={"inverse": ((1.0, 1e-9), (1e4, 1e3))},  # n^3 nanoseconds
    products=((1.0, 1e12),),
)
FORMS = forms("inverse")
JOB = Job("net", 32, factor_update_steps=1, inv_update_steps=10)


def end(groups, seconds, ready, latency):
    """Return the end of all messages, if layers are sent in the given groups."""
    line, first = 0.0, len(seconds)
    for count in reversed(groups):
        first -= count
        length = sum(seconds[first : first + count]) - (count - 1) * latency
        line = max(line, ready[first]) + length
    return line


@pytest.mark.parametrize(
    ("seconds", "ready", "groups"),
    [
        ([2, 2, 2], [30, 20, 10], (1, 1, 1)),  # the line is free whenever a layer is ready
        ([9, 9, 30], [12, 11, 10], (2, 1)),  # both wait for the last one anyway, and save a latency
        ([9, 9, 2], [13, 11, 10], (2, 1)),  # the last one ends at 12; of three in one, at 30
        ([9, 9, 30], [20, 15, 10], (2, 1)),  # both layers are ready during the last layer's message
        ([9], [10], (1,)),
    ],
)
def test_merging_by_hand(seconds, ready, groups):
    """Oracle: the rule by hand, with a latency of 1.5."""
    assert tuning.merged(seconds, ready, 1.5) == groups


@given(
    st.lists(st.tuples(st.floats(1.1, 9.0), st.floats(0.1, 9.0)), min_size=1, max_size=7),
    st.floats(0.0, 1.0),
)
def test_merged_messages_end_first(layers, latency):
    """Oracle: the best of all groups, each played; a layer's own time is at least the latency."""
    seconds = [own for own, _ in layers]
    gaps = [gap for _, gap in layers]
    ready = list(itertools.accumulate(reversed(gaps)))[::-1]
    found = tuning.merged(seconds, ready, latency)
    assert sum(found) == len(layers)
    cuts = itertools.product((False, True), repeat=len(layers) - 1)
    best = min(end(groups_of(cut), seconds, ready, latency) for cut in cuts)
    assert end(found, seconds, ready, latency) == pytest.approx(best, rel=1e-12)


def groups_of(cut):
    """Return the groups of layers between cuts; `cut[n]` is whether one lies behind layer n."""
    places = [n for n, here in enumerate(cut, start=1) if here]
    return tuple(b - a for a, b in itertools.pairwise([0, *places, len(cut) + 1]))


def test_small_factors_are_replicated_while_that_takes_less_than_a_message():
    """Oracle: n^3 ns against a gather of 4 n^2 bytes in 2 rounds of 1 ms at 10 MB/s, by hand.

    n^3 ns is more than 3e-7 n^2 + 2e-3 from n = 320 on: of the orders 32 to 512, from 512 on.
    """
    strategy = Strategy(CommOpt(replicate_below=1))
    assert tuning.replicated_below(strategy, LAYERS, 4, MACHINE, FORMS) == 512
    slow = dataclasses.replace(MACHINE, inside=Level(1e3, 1e7))
    assert tuning.replicated_below(strategy, LAYERS, 4, slow, FORMS) == 513
    found = tuning.tuned(strategy, LAYERS, (), 4, MACHINE, JOB, FORMS)
    assert found == Strategy(CommOpt(replicate_below=512))


def test_low_rank_is_decomposed_everywhere_by_its_own_bytes_and_work():
    """Oracle: by hand: 2 n^2 r ns are more than 3/4 of 4 n r bytes at 10 MB/s from n = 150 on.

    Of whole factors n^3 ns would be from n = 300 on.
    """
    layers = [dataclasses.replace(layer, rank=8) for layer in LAYERS]
    machine = dataclasses.replace(
        MACHINE,
        inside=Level(0.0, 1e7),
        decompositions={"eigen": MACHINE.decompositions["inverse"]},
    )
    found = tuning.replicated_below(
        Strategy(CommOpt(replicate_below=1)), layers, 4, machine, forms("eigen")
    )
    assert found == 256


def test_overlapped_messages_are_merged_for_the_machine():
    """Oracle: the rule on the plan's own messages; all layers are sent, front to back."""
    strategy = Strategy(transport=Transport(fusion=1, overlap=True))
    found = tuning.tuned(strategy, LAYERS, (), 4, MACHINE, JOB, FORMS)
    assert sum(found.transport.fusion) == len(LAYERS)
    hopeless = dataclasses.replace(MACHINE, inside=Level(1e3, 1e7))
    assert tuning.tuned(strategy, LAYERS, (), 4, hopeless, JOB, FORMS).transport.fusion == (4,)
    assert tuning.tuned(Strategy(), LAYERS, (), 4, MACHINE, JOB, FORMS) == Strategy()


def test_the_strategy_that_is_chosen_is_the_fastest_by_the_model():
    """Oracle: predictions of all strategies that train like a single process."""
    name, strategy = tuning.choose(LAYERS, (), 4, MACHINE, JOB, FORMS)
    found = mpikfac.predict.simulate(make_plan(LAYERS, 4, strategy, ()), MACHINE, JOB).mean.seconds
    others = (
        "kfac-opt",
        "kfac-lw",
        "comm-opt",
        "mem-opt",
        "sharded-optimizer",
        "deferred-allreduce",
    )
    rivals = [mpikfac.plan.NAMED[other].strategy for other in others]
    for rival in (*rivals, Strategy(HybridOpt(grad_workers=2))):
        plan = make_plan(LAYERS, 4, rival, ())
        assert found <= mpikfac.predict.simulate(plan, MACHINE, JOB).mean.seconds
    assert mpikfac.plan.NAMED[name].same


def test_only_what_the_preconditioner_can_do_is_chosen_from():
    """Oracle: EKFAC's ranks all hold all bases; an inverse has no eigenvectors to keep."""
    both = {"eigen": MACHINE.decompositions["inverse"], **MACHINE.decompositions}
    machine = dataclasses.replace(MACHINE, decompositions=both)
    _, strategy = tuning.choose(LAYERS, (), 4, machine, JOB, forms("ekfac"))
    assert strategy.assignment == CommOpt()
    layers = [dataclasses.replace(layer, rank=2) for layer in LAYERS]
    with pytest.raises(ValueError, match="preconditioner='eigen', not 'inverse'"):
        tuning.choose(layers, (), 4, MACHINE, JOB, FORMS)
