from __future__ import annotations

import itertools
import math

import pytest

from mpikfac import Damping
from mpikfac.settings import Settings, usual_intervals
from mpikfac.settings.schedule import constant, cosine, evaluate, every, linear, step_decay, warmup


def test_plain_numbers_and_functions_are_schedules() -> None:
    """Oracle: the number, and the function's own value."""
    assert evaluate(0.003, 17) == 0.003
    assert evaluate(lambda step: 2.0 * step, 17) == 34.0
    assert constant(0.95)(10**9) == 0.95


def test_halving_twice_is_a_quarter_however_often_it_was_asked() -> None:
    """Oracle: damping meant to be halved at epochs 3 and 6 is a quarter at epoch 8.

    An implementation that multiplies into its state compounds the factor at every call.
    """
    damping = step_decay(0.003, at=[3, 6], factor=0.5)
    for epoch in range(8):
        damping(epoch)
    assert damping(8) == 0.003 / 4
    assert [damping(epoch) for epoch in (0, 2, 3, 5, 6)] == [0.003, 0.003, 0.0015, 0.0015, 0.00075]


def test_the_order_of_questions_does_not_matter() -> None:
    """Oracle: the same schedule asked in ascending order."""
    schedule = warmup(step_decay(1.0, at=[7, 15], factor=0.1), 5, 0.2)
    ascending = [schedule(step) for step in range(30)]
    assert [schedule(step) for step in reversed(range(30))] == ascending[::-1]


@pytest.mark.parametrize("shape", [linear, cosine])
def test_annealing_meets_both_ends_and_stays(shape) -> None:
    """Oracle: the definition at both ends and the middle."""
    schedule = shape(0.8, 0.0, 100)
    assert schedule(0) == 0.8
    assert schedule(50) == pytest.approx(0.4)
    assert schedule(100) == schedule(1000) == 0.0
    assert all(schedule(step + 1) < schedule(step) for step in range(100))


def test_linear_may_rise() -> None:
    """Oracle: the straight line by hand."""
    assert [linear(1.0, 3.0, 4)(step) for step in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]


def test_warmup_scales_what_it_wraps() -> None:
    """Oracle: learning rate 0.1 x 4 ranks, warmed up from 0.1 over 5 steps, by hand."""
    schedule = warmup(step_decay(0.4, at=[8], factor=0.1), 5, 1 / 4)
    expected = [0.1, 0.16, 0.22, 0.28, 0.34, 0.4, 0.4, 0.4, 0.04]
    assert [schedule(step) for step in range(9)] == pytest.approx(expected)
    assert warmup(0.4, 5)(0) == 0.0
    assert warmup(0.4, 5)(5) == 0.4


def test_every_follows_the_interval_in_force() -> None:
    """Oracle: the multiples by hand; the interval changes from 2 to 4 at step 5."""
    assert [step for step in range(12) if every(5, step)] == [0, 5, 10]
    interval = step_decay(2, at=[5], factor=2)
    assert [step for step in range(14) if every(interval, step)] == [0, 2, 4, 8, 12]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.1, "0.1", None])
def test_bad_numbers_are_refused_where_they_enter(bad) -> None:
    """Oracle: the message names the argument and the value."""
    calls = [
        lambda: constant(bad),
        lambda: evaluate(bad, 0),
        lambda: evaluate(lambda step: bad, 3),
        lambda: step_decay(bad, [1], 0.5),
        lambda: step_decay(1.0, [1], bad),
        lambda: linear(bad, 1.0, 3),
        lambda: cosine(1.0, bad, 3),
        lambda: warmup(bad, 3),
        lambda: warmup(1.0, 3, bad),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"={bad!r} |step 3={bad!r} "):
            call()


@pytest.mark.parametrize("steps", [0, -3, 2.5, math.nan, "3"])
def test_bad_lengths_are_refused(steps) -> None:
    """Oracle: the message names `steps` and the value."""
    for call in (
        lambda: linear(1.0, 0.0, steps),
        lambda: cosine(1.0, 0.0, steps),
        lambda: warmup(1.0, steps),
    ):
        with pytest.raises(ValueError, match=f"steps={steps!r}"):
            call()


def test_bad_milestones_and_factors_are_refused() -> None:
    """Oracle: the message names the argument and the remedy."""
    with pytest.raises(ValueError, match="strictly increasing"):
        step_decay(1.0, [6, 3], 0.5)
    with pytest.raises(ValueError, match="whole numbers"):
        step_decay(1.0, [-1, 3], 0.5)
    with pytest.raises(ValueError, match=r"from_factor=1.5 must be at most 1"):
        warmup(1.0, 3, 1.5)


@pytest.mark.parametrize("interval", [0, 0.5, 2.5, lambda step: 0])
def test_bad_intervals_are_refused(interval) -> None:
    """Oracle: the message names the remedy."""
    with pytest.raises(ValueError, match="whole number >= 1"):
        every(interval, 4)


INTERVALS = {
    **{str(every): every for every in (1, 2, 8, 10, 13, 21, 34, 50, 55, 89, 100, 144)},
    "grows at each update": lambda step: max(1, step // 10),
    "usual": usual_intervals().factor_update_steps,
}


@pytest.mark.parametrize("every", INTERVALS.values(), ids=INTERVALS)
def test_examples_of_updates_begin_everywhere_in_turn(every):
    """Oracle: 30 places leave no gap of 0.2; by the three-gap theorem at most 0.06 is left."""
    settings = Settings(Damping(), every, 1, 0.9)
    steps = [step for step in range(200, 6000) if settings.due("factor_update_steps", step)]
    begins = sorted(map(settings.begin, steps[:30]))
    gaps = [later - earlier for earlier, later in itertools.pairwise([*begins, begins[0] + 1])]
    assert max(gaps) < 0.2
