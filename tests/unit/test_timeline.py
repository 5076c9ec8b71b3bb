"""Timelines of two ranks in a row, (0, 0) and (0, 1), with given times."""

from __future__ import annotations

import itertools
import json

import pytest

from mpikfac.timeline import (
    Recorded,
    chrome_trace,
    collective_means,
    collective_table,
    self_seconds,
    stage_means,
    stage_table,
    waiting,
)
from mpikfac.trace import Event

# Rank 0's backward pass ends early, so that rank 0 waits 2 s for rank 1 in the sum; rank 1
# waits for rank 0 later. A thread sends during both backward passes. Rank 0's thread also sends
# the rest of a message that was under way at the start of the recording. Children come first.
RANK0 = [
    Event("forward", 0.0, 2.0),
    Event("statistics", 3.0, 4.0, depth=1),
    Event("statistics", 5.0, 5.5, depth=1),
    Event("publish gradients", 2.0, 2.5, "row", 30, thread="messages"),
    Event("publish gradients", 3.0, 7.0, "row", 60, thread="messages"),
    Event("backward", 2.0, 6.0),
    Event("reduce gradients", 6.0, 9.0, "world", 100),
    Event("publish weights", 9.5, 10.0, "world", 20),
]
RANK1 = [
    Event("forward", 0.0, 2.0),
    Event("statistics", 3.0, 4.0, depth=1),
    Event("statistics", 6.0, 7.5, depth=1),
    Event("publish gradients", 6.0, 7.0, "row", 40, thread="messages"),
    Event("backward", 2.0, 8.0),
    Event("reduce gradients", 8.0, 9.0, "world", 100),
    Event("publish weights", 9.0, 10.0, "world", 80),
]
RANKS = [Recorded({7: (0.0, 10.5)}, RANK0), Recorded({7: (0.0, 10.5)}, RANK1)]


def test_time_inside_a_stage_is_counted_once():
    """Oracle: differences by hand; the depth of other threads does not count."""
    assert self_seconds(RANK0) == [2.0, 1.0, 0.5, 0.5, 4.0, 2.5, 3.0, 0.5]
    nested = [Event("c", 2, 3, depth=2), Event("b", 1, 4, depth=1), Event("a", 0, 6)]
    assert self_seconds([*nested, Event("a", 6, 7)]) == [1, 2, 3, 1]


def test_a_rank_waits_until_the_last_member_has_come():
    """Oracle: by hand, collective by collective; without the thread, whose messages do not pair."""
    assert waiting([RANK0, RANK1], columns=2) == [
        [0, 0, 0, 0, 0, 0, 2.0, 0],
        [0, 0, 0, 0, 0, 0, 0.5],
    ]


def test_ranks_wait_for_members_of_their_own_column_and_row():
    """Oracle: by hand, on a grid of 2 x 2: columns {0, 2} and {1, 3}, rows {0, 1} and {2, 3}."""
    starts = [0.0, 1.0, 2.0, 4.0]
    column, row = (
        [[Event("gather", start, 10.0, over)] for start in starts] for over in ("column", "row")
    )
    assert waiting(column, columns=2) == [[2.0], [3.0], [0.0], [0.0]]
    assert waiting(row, columns=2) == [[1.0], [0.0], [2.0], [0.0]]


def test_ranks_wait_for_members_of_their_own_node_and_place():
    """Oracle: by hand: two nodes of two ranks; ranks 0 and 2, and 1 and 3, have equal places."""
    starts = [0.0, 1.0, 2.0, 4.0]
    inside = [f"world in node {rank // 2}" for rank in range(4)]
    across = [f"world between nodes {rank % 2}" for rank in range(4)]
    for names, expected in ((inside, [1.0, 0.0, 2.0, 0.0]), (across, [2.0, 3.0, 0.0, 0.0])):
        ranks = [[Event("sum", start, 9.0, over)] for start, over in zip(starts, names)]
        assert waiting(ranks, columns=4) == [[seconds] for seconds in expected]


@pytest.mark.parametrize("over", ["curvature", "servers", "group", "peers"])
def test_waiting_for_ranks_that_the_grid_does_not_know_counts_as_nothing(over):
    """Oracle: by hand: ranks talk to servers alone, and groups of split layers are unknown."""
    ranks = [[Event("exchange", start, 9.0, over, 8)] for start in (0.0, 5.0)]
    assert waiting(ranks, columns=1) == [[0.0], [0.0]]


def test_nobody_waits_in_a_collective_that_is_over():
    """Oracle: the end; a sender may be through before the last receiver comes."""
    ranks = [[Event("clip", 0.0, 1.0, "world", 8)], [Event("clip", 5.0, 6.0, "world", 8)]]
    assert waiting(ranks, columns=1) == [[1.0], [0.0]]


def test_clocks_are_set_by_their_offsets():
    """Oracle: rank 1's times by a clock that shows 5 s less."""
    behind = RANKS[1].later(-5.0)
    assert behind.events[0].start == -5.0
    assert behind.later(5.0) == RANKS[1]


def test_means_add_up_to_the_step():
    """Oracle: by hand, over two equal steps."""
    twice = [
        Recorded({7: (0.0, 10.5), 8: (20.0, 30.5)}, [*rank.events, *rank.later(20.0).events])
        for rank in RANKS
    ]
    means = stage_means(twice, columns=2)
    assert (means["steps"], means["rows"], means["columns"]) == ([7, 8], 1, 2)
    assert means["seconds"] == 10.5
    first = means["ranks"][0]
    assert first["stages"]["statistics"] == {"seconds": 1.5, "calls": 2, "bytes": 0, "waiting": 0}
    sums = {"seconds": 3.0, "calls": 1, "bytes": 100, "waiting": 2.0}
    assert first["stages"]["reduce gradients"] == sums
    sent = {"seconds": 4.5, "calls": 2, "bytes": 90, "waiting": 0}
    assert first["beside"] == {"messages": {"publish gradients": sent}}
    for rank in means["ranks"]:
        assert sum(stage["seconds"] for stage in rank["stages"].values()) == rank["seconds"]
    assert first["stages"]["other"]["seconds"] == 1.0
    assert json.loads(json.dumps(means)) == means


def test_the_table_shows_shares_without_waiting():
    """Oracle: means of the two ranks by hand, in ms; the first column adds up to the step."""
    rows = {row[0]: row[1:] for row in stage_table(stage_means(RANKS, columns=2))}
    assert rows["stage"] == ["ms", "share", "slowest", "waiting", "MB sent"]
    assert rows["statistics"] == ["2000.00", "19.0%", "2500.00", "0.00", "0.000"]
    assert rows["reduce gradients"] == ["1000.00", "9.5%", "1000.00", "1000.00", "0.000"]
    assert rows["waiting"] == ["1250.00", "11.9%", "", "", ""]
    assert rows["step"] == ["10500.00", "100.0%", "10500.00", "1250.00", "0.000"]
    beside = "background, messages: publish gradients"
    assert rows[beside] == ["2750.00", "26.2%", "4500.00", "0.00", "0.000"]
    parts = [float(row[0]) for name, row in rows.items() if name not in ("stage", "step", beside)]
    assert sum(parts) == pytest.approx(10500)


# Two steps of 10 s on a rank. Message 1 has two pieces, 2 to 5 s, with a piece of the more urgent
# message 2 between them; message 3 crosses the border of the steps. The training waits for the
# statistics from 4.5 to 5 s and for the gradients from 8 to 9 s.
SENDING = [
    Event("reduce statistics", 2.0, 2.5, "world", 40, thread="outbox", flight=1),
    Event("reduce gradients", 3.0, 3.5, "world", 8, thread="outbox", flight=2),
    Event("reduce statistics", 4.0, 5.0, "world", 60, thread="outbox", flight=1),
    Event("reduce statistics", 4.5, 5.0),
    Event("backward", 0.0, 7.0),
    Event("publish gradients", 7.0, 8.0, "row", 30),
    Event("reduce gradients", 8.0, 9.0),
    Event("reduce gradients", 7.5, 12.5, "world", 20, thread="outbox", flight=3),
]
STEPS = {4: (0.0, 10.0), 5: (10.0, 20.0)}


def test_messages_are_hidden_while_the_training_computes():
    """Oracle: by hand, halved for two steps.

    Statistics fly 3 s, of which the training waits 0.5 s. Gradients fly 0.5 s and 5 s; in the last
    half second of `publish gradients` and during the wait of 1 s nothing is computed. Both stages
    begin in one of the two steps, so one run of each counts alone.
    """
    alone = {"reduce statistics": 2.0, "reduce gradients": 3.0}
    found = collective_means([Recorded(STEPS, SENDING)], [alone])
    assert found["reduce statistics"] == {
        **{"bytes": 50.0, "isolated": 1.0, "in_flight": 1.5, "exposed": 0.25},
        "hidden": 1 - 0.25 / 1.5,
    }
    assert found["reduce gradients"] == {
        **{"bytes": 14.0, "isolated": 1.5, "in_flight": 2.75, "exposed": 0.75},
        "hidden": 1 - 0.75 / 2.75,
    }
    blocking = {"bytes": 15.0, "isolated": None, "in_flight": 0.5, "exposed": 0.5, "hidden": 0.0}
    assert found["publish gradients"] == blocking
    assert json.loads(json.dumps(found)) == found


def test_means_of_messages_are_over_all_ranks():
    """Oracle: by hand; a rank without a stage counts with 0."""
    mine = Recorded({4: (0.0, 10.0)}, [Event("clip", 1.0, 3.0, "world", 8)])
    idle = Recorded({4: (0.0, 10.0)}, [])
    found = collective_means([mine, idle], [{"clip": 1.0}, {"clip": 1.0}])
    assert found == {
        "clip": {"bytes": 4.0, "isolated": 0.5, "in_flight": 1.0, "exposed": 1.0, "hidden": 0.0}
    }
    assert collective_means([idle, idle], [{}, {}]) == {}


def test_the_table_of_messages_has_sums():
    """Oracle: the numbers above, in ms; the hidden share of the sums, 1 - 1.5 / 4.75."""
    alone = {"reduce statistics": 2.0, "reduce gradients": 3.0}
    found = collective_means([Recorded(STEPS, SENDING)], [alone])
    rows = {row[0]: row[1:] for row in collective_table(found)}
    assert rows["collective"] == ["MB sent", "isolated", "in flight", "exposed", "hidden"]
    assert rows["reduce statistics"] == ["0.000", "1000.00", "1500.00", "250.00", "83.3%"]
    assert rows["publish gradients"] == ["0.000", "-", "500.00", "500.00", "0.0%"]
    assert rows["all"] == ["0.000", "2500.00", "4750.00", "1500.00", "68.4%"]


def test_the_picture_is_json_whose_slices_nest():
    """Oracle: the trace format's rules for slices, and the events with waiting."""
    picture = json.loads(json.dumps(chrome_trace(RANKS, columns=2)))
    slices = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    labels = [event for event in picture["traceEvents"] if event["ph"] == "M"]
    assert len(slices) == 2 + len(RANK0) + len(RANK1) + 2
    assert len(slices) + len(labels) == len(picture["traceEvents"])
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in labels if e["name"] == "thread_name"}
    assert names == {
        (rank, row): name
        for rank in (0, 1)
        for row, name in enumerate(["steps", "training", "messages"])
    }
    assert {(e["pid"], e["tid"]) for e in slices} == names.keys()
    (sent,) = (e for e in slices if e["name"] == "publish gradients" and e["pid"] == 1)
    assert sent["args"] == {"over": "row", "bytes": 40}
    assert (sent["ts"], sent["dur"]) == (6e6, 1e6)
    waits = [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in slices if e["name"] == "waiting"]
    assert waits == [(0, 1, 6e6, 2e6), (1, 1, 9e6, 0.5e6)]
    for place in names:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == place]
        for (a, b), (c, d) in itertools.combinations(spans, 2):
            apart, nested = b <= c or d <= a, (a - c) * (b - d) <= 0
            assert apart or nested
