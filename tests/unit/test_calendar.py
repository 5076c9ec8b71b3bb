"""The steps of epochs with changing batch sizes, compared with a list of all steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpikfac_apps.options.by_epoch import read
from mpikfac_apps.options.options import Options
from mpikfac_apps.training.calendar import Calendar
from mpikfac_apps.training.timetable import Timetable

IMAGES, EPOCHS = 50, 9
BATCHES = {
    "constant": 12,
    "growing": "5 until 2, 12 until 3, 50",
    "falling": "50 until 1, 7 until 4, 20",
    "late": "10 until 20, 50",
}


@pytest.fixture(params=BATCHES)
def calendar(request):
    batch = BATCHES[request.param]
    return Calendar(IMAGES, read(batch, int) if isinstance(batch, str) else batch)


def listed(calendar):
    """Return epoch and position of every step, by counting."""
    by_epoch = calendar.batch if callable(calendar.batch) else lambda _: calendar.batch
    return [(epoch, i) for epoch in range(EPOCHS) for i in range(IMAGES // by_epoch(epoch))]


def test_places_follow_each_other(calendar):
    """Oracle: the list of all steps."""
    places = listed(calendar)
    assert [calendar.place(step) for step in range(len(places))] == places
    for epoch in range(EPOCHS):
        assert calendar.first(epoch) == places.index((epoch, 0))
    assert calendar.first(EPOCHS) == len(places)


def test_fractions_of_epochs_are_positions_over_steps(calendar):
    """Oracle: the list of all steps; whole epochs without rounding."""
    for step, (epoch, index) in enumerate(listed(calendar)):
        steps = calendar.at(epoch).steps
        assert calendar.epochs(step) == pytest.approx(epoch + index / steps, rel=1e-15)
        assert calendar.epochs(calendar.first(epoch)) == epoch


def test_the_clock_shows_the_same_age_in_epochs(calendar):
    """Oracle: the age in epochs, rounded down to a step of epoch 0; a constant batch's steps."""
    tick = 1 / calendar.at(0).steps
    for step in range(calendar.first(EPOCHS) + 1):
        age = calendar.clock(step) * tick
        assert age <= calendar.epochs(step) + 1e-12 < age + tick + 2e-12
        if calendar.batch == 12:
            assert calendar.clock(step) == step
            assert calendar.epochs(step) == step / 4


def test_what_is_due_follows_the_epochs(calendar):
    """Oracle: the list of all steps; an epoch ends where the next step has another epoch."""
    options = Options(epochs=EPOCHS, eval_steps=5, eval_every=4, checkpoint_every=3)
    timetable = Timetable(calendar, options, ranks=1)
    places = listed(calendar)
    ends = {
        steps: places[steps - 1][0] + 1
        for steps in range(1, len(places) + 1)
        if steps == len(places) or places[steps][1] == 0
    }
    assert timetable.steps == len(places)
    for steps in range(1, len(places) + 1):
        assert timetable.ended_epoch(steps) == ends.get(steps)
        assert timetable.test_due(steps) == (steps in ends or steps % 5 == 0)
        assert timetable.meeting_due(steps) == (steps % 3 == 0)
    assert [n for n in range(1, EPOCHS + 1) if timetable.test_of_epoch_due(n)] == [4, 8, 9]
    shorter = replace(options, max_steps=3)
    assert Timetable(calendar, shorter, ranks=1).steps == 3
