"""Predicted seconds of messages against a simulation of the messages in SimGrid's SMPI."""

from __future__ import annotations

import pytest

from mpikfac.plan import Message
from mpikfac.predict import Level, Machine, load_machine
from support import smpi

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(smpi.missing()), reason=smpi.missing() or "SMPI is here"),
]
TOLERANCE = 0.25
# Columns send their bases at once, and each is charged as if all were as full as the fullest.
WIDE = {("hybrid", (True, True)): 0.4}
KINDS = ((False, False), (True, False), (True, True))
"""Whether a step has new factors, and new bases."""
STRATEGIES = (
    *("sgd", "comm-opt", "comm-opt in parts", "mem-opt", "mem-opt in parts", "hybrid"),
    *("deferred-sharded", "deferred-sharded in parts", "sharded-optimizer"),
    *("balanced-shards", "balanced-shards on nodes", "spd-kfac"),
)
LIMIT = 120  # real seconds of a simulation, for hangs alone
MIB = 2**20
NET = Machine("by hand", Level(2e-5, 2e9), (), {}, ranks_per_node=2, between=Level(2e-5, 1e9))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Return a function that simulates messages, the same message of several plans once."""
    known = {}

    def seconds(messages, machine, ranks):
        of_machine = known.setdefault((machine.name, ranks), {})
        new = [message for message in messages if message not in of_machine]
        if new:
            folder = tmp_path_factory.mktemp("smpi")
            of_machine |= smpi.simulated(new, machine, ranks, folder, LIMIT)
        return [of_machine[message] for message in messages]

    return seconds


@pytest.mark.parametrize("machine", ["a100-hdr", "v100-edr"])
@pytest.mark.parametrize("ranks", [16, 64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predicted_messages_take_the_simulated_seconds(strategy, ranks, machine, simulated):
    """Oracle: SMPI, which carries out every message of all ranks on a network with contention."""
    plan, network = smpi.plan_of(strategy, ranks, machine), load_machine(machine)
    for kind in KINDS:
        stages, messages = zip(*smpi.replayed(plan, *kind))
        oracle = smpi.by_stage(zip(stages, simulated(messages, network, ranks)))
        predicted = smpi.predicted(plan, network, *kind)
        tolerance = WIDE.get((strategy, kind), TOLERANCE)
        expected = pytest.approx(sum(oracle.values()), rel=tolerance)
        assert sum(predicted.values()) == expected, (kind, predicted, oracle)


# -- the simulation itself -------------------------------------------------------------------------


def of_world(primitive, algorithm, numbers, ranks):
    """Return a message of a single call of all ranks; `numbers` count MiB."""
    numbers = tuple(n * MIB // smpi.WORD // smpi.SCALE for n in numbers)
    return smpi.Replayed(primitive, algorithm, ((range(ranks), (smpi.Call(numbers, ()),)),))


def pairs(first, step, size):
    """Return the teams of 2 of 4 ranks that exchange `size` MiB at once, each in an Allreduce."""
    call = (smpi.Call((size * MIB // smpi.WORD // smpi.SCALE,), ()),)
    teams = tuple((range(begin, begin + step + 1, step), call) for begin in first)
    return smpi.Replayed("Allreduce", "doubling", teams)


def transfers(*pairs):
    """Return a message of 6 ranks with transfers of 64 MiB from rank to rank."""
    count = 64 * MIB // smpi.WORD // smpi.SCALE
    numbers = tuple(number for pair in pairs for number in (*pair, count))
    return smpi.Replayed("Isend, Irecv", "", ((range(6), (smpi.Call(numbers, ()),)),))


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        # The two ranks of a node exchange 64 MiB over their own links of 2 GB/s.
        (pairs([0, 2], 1, 64), 2e-5 + 64 * MIB / 2e9),
        # The link of a node, 1 GB/s, is shared by the ranks of the node.
        (pairs([0], 2, 64), 2e-5 + 64 * MIB / 1e9),
        (pairs([0, 1], 2, 64), 2e-5 + 2 * 64 * MIB / 1e9),
        # The link out of node 0, and into a node, is shared; a link has both directions.
        (transfers((0, 2), (1, 4)), 2e-5 + 2 * 64 * MIB / 1e9),
        (transfers((2, 0), (4, 1)), 2e-5 + 2 * 64 * MIB / 1e9),
        (transfers((0, 4), (2, 5)), 2e-5 + 2 * 64 * MIB / 1e9),
        (transfers((0, 2), (4, 1)), 2e-5 + 64 * MIB / 1e9),
        # Ring of 4 ranks: the part of rank 0 goes to rank 1, then 2 on the other node, then 3.
        (of_world("Allgatherv", "ring", (64, 0, 0, 0), 4), 6e-5 + 2 * 64 * MIB / 1e9),
        # Tree of 4 ranks with 3 children: rank 0 sends all copies at once, 2 of 3 off the node.
        (of_world("Bcast", "knomial", (0, 64), 4), 2e-5 + 2 * 64 * MIB / 1e9),
        # Tree of 4 ranks: ranks 2 and 3 add up in the node, and rank 2 sends the sum to rank 0.
        (of_world("Reduce", "binomial", (0, 64), 4), 4e-5 + 64 * MIB / 2e9 + 64 * MIB / 1e9),
    ],
    ids=[
        *(
            "in a node",
            "between nodes",
            "shared",
            "out",
            "into 0",
            "into 2",
            "both",
            "ring",
            "k-nomial",
        ),
        "tree",
    ],
)
def test_the_simulated_network_has_the_machines_levels(message, seconds, tmp_path):
    """Oracle: by hand, from latencies and bandwidths."""
    (simulated,) = smpi.simulated([message], NET, 6, tmp_path, LIMIT).values()
    assert simulated == pytest.approx(seconds, rel=0.05)


def test_a_message_sends_all_its_elements_in_pieces():
    """Oracle: sums; a piece has about the same share of every part."""
    pieces = list(smpi.pieces([5000, 0, 1000], 1024, "Reduce_scatter"))
    assert len(pieces) == 6
    assert [sum(counts) for counts in zip(*pieces)] == [5000, 0, 1000]
    assert {abs(sum(counts) - 1000) <= 1 for counts in pieces} == {True}
    assert list(smpi.pieces([2500], 1024, "Allreduce")) == [[1024], [1024], [452]]


def test_transfers_are_the_elements_that_another_member_needs():
    """Oracle: by hand."""
    before, after = [(0, 10), (10, 20), (20, 30)], [(0, 15), (15, 15), (15, 30)]
    assert list(smpi.transfers(before, after)) == [(1, 0, 5), (1, 2, 5)]


def test_an_encoded_message_is_refused():
    """Oracle: one line that names the message."""
    message = Message("clip", "Send, Bcast", "world", ((0, 4),), -1, 16, 16, 16)
    with pytest.raises(ValueError, match="Send, Bcast of 'clip' is not replayed"):
        smpi.calls_of(message, range(2), smpi.plan_of("sgd", 16, "a100-hdr"))
