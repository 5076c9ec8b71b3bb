"""The thread that sends the most urgent message first; prepared answers replace other ranks."""

from __future__ import annotations

import random
import threading
import time

import pytest

from mpikfac import UserError
from mpikfac.comm.messages import outbox as outbox_module
from mpikfac.comm.messages.outbox import Outbox, Piece
from mpikfac.plan import BATCH
from support.pace import paced


class Line:
    """A line on which pieces arrive, piece by piece, when the test lets pieces through."""

    def __init__(self):
        self.arrived = []
        self.gate = threading.Semaphore(0)

    def pieces(self, name, count, size=BATCH):
        def send():
            assert self.gate.acquire(timeout=paced(10))
            self.arrived.append(name)

        return [Piece(size, send)] * count

    def let_through(self, count):
        for _ in range(count):
            self.gate.release()


class Ranks:
    """Ranks that are threads of the test: what they ask, and the order of their collectives."""

    def __init__(self, count):
        self.asked = [[] for _ in range(count)]
        self.calls = [[] for _ in range(count)]
        self.changed = threading.Condition()

    def outbox(self, rank):
        def ask(numbers):
            turn = len(self.asked[rank])
            self.calls[rank].append("ask")
            with self.changed:
                self.asked[rank].append(set(numbers))
                self.changed.notify_all()
            return lambda: self.in_common(turn)

        return Outbox(ask)

    def in_common(self, turn):
        def complete():
            return all(len(asked) > turn for asked in self.asked)

        with self.changed:
            assert self.changed.wait_for(complete, paced(10))
        return sorted(set.intersection(*(asked[turn] for asked in self.asked)))

    def pieces(self, rank, number, sizes, delays):
        def send(part):
            time.sleep(delays.random() / 1000)
            self.calls[rank].append((number, part))

        return [Piece(size, lambda k=k: send(k)) for k, size in enumerate(sizes)]


def alone(ready):
    """Ask where all ranks have the same messages ready."""
    return lambda: list(ready)


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def outbox():
    box = Outbox(alone)
    yield box
    box.close()


def test_an_urgent_message_overtakes_one_that_was_begun(line, outbox):
    """Oracle: by hand: of five batches, one is under way and one agreed on; then the urgent one."""
    begun = threading.Event()
    outbox.put(0, 5, [Piece(BATCH, begun.set), *line.pieces("slow", 4)])
    assert begun.wait(10)
    outbox.put(1, 1, line.pieces("urgent", 2))
    line.let_through(6)
    outbox.wait(0)
    outbox.wait(1)
    assert sorted(line.arrived) == ["slow"] * 4 + ["urgent"] * 2
    assert line.arrived.index("urgent") <= 2
    assert line.arrived[-2:] == ["slow", "slow"]


def test_messages_share_an_agreement_up_to_the_size_of_a_batch(line):
    """Oracle: by hand: 4 + 4 quarters of a batch, then a piece of a batch and a half."""
    asked, everywhere = [], threading.Event()

    def ask(ready):
        if not everywhere.is_set():
            return lambda: []
        asked.append(ready)
        return lambda: ready

    outbox = Outbox(ask)
    for number in range(8):
        outbox.put(number, 0, line.pieces(number, 1, BATCH // 4))
    outbox.put(8, 0, line.pieces(8, 1, BATCH + BATCH // 2))
    line.let_through(9)
    everywhere.set()
    outbox.close()
    assert line.arrived == list(range(9))
    assert asked == [list(range(9)), list(range(4, 9)), [8], []]


def test_a_message_is_sent_when_its_last_piece_is(outbox):
    """Oracle: by hand: both pieces are in a batch, and nobody returns before the last piece."""
    returned, too_early = threading.Event(), []
    pieces = [Piece(1, lambda: None), Piece(1, lambda: too_early.append(returned.wait(0.1)))]
    outbox.put(0, 0, pieces)
    outbox.wait(0)
    returned.set()
    assert too_early == [False]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_call_the_same_collectives_in_the_same_order(seed):
    """Oracle: equal lists of calls, asks among them: else MPI waits for ever, or mixes messages."""
    ranks, messages = Ranks(3), 12
    shapes = random.Random(seed)
    sizes = [
        [shapes.choice((1, BATCH // 3, BATCH))] * shapes.randint(1, 3) for _ in range(messages)
    ]
    urgencies = [shapes.randint(0, 1) for _ in range(messages)]

    def train(rank):
        moments = random.Random(1000 * seed + rank)
        outbox = ranks.outbox(rank)
        for _ in range(2):  # steps
            for number in moments.sample(range(messages), messages):
                time.sleep(moments.random() / 1000)
                pieces = ranks.pieces(rank, number, sizes[number], moments)
                outbox.put(number, urgencies[number], pieces)
            for number in range(messages):
                outbox.wait(number)
        outbox.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(paced(20))
    assert ranks.calls[0] == ranks.calls[1] == ranks.calls[2]
    parts = [call for call in ranks.calls[0] if call != "ask"]
    assert sorted(parts) == sorted(
        (number, k) for number in range(messages) for k in range(len(sizes[number])) for _ in "12"
    )


def test_of_equally_urgent_messages_the_lower_number_goes_first(line):
    """Oracle: by hand; nothing is sent until all ranks have both messages."""
    everywhere = threading.Event()
    outbox = Outbox(lambda ready: lambda: list(ready) if everywhere.is_set() else [])
    outbox.put(3, 1, line.pieces("three", 1))
    outbox.put(2, 1, line.pieces("two", 1))
    line.let_through(2)
    assert line.arrived == []
    everywhere.set()
    outbox.wait(3)
    assert line.arrived == ["two", "three"]
    outbox.close()


def test_only_what_all_ranks_have_is_sent(line):
    """Oracle: by hand: a second rank has the less urgent message first, then both messages."""
    theirs = {1}
    outbox = Outbox(lambda ready: lambda: [number for number in ready if number in theirs])
    outbox.put(0, 0, line.pieces("first", 1))
    outbox.put(1, 9, line.pieces("second", 1))
    line.let_through(2)
    outbox.wait(1)
    assert line.arrived == ["second"]
    theirs.add(0)
    outbox.wait(0)
    assert line.arrived == ["second", "first"]
    outbox.close()


def test_a_number_is_free_again_once_it_was_waited_for(line, outbox):
    """Oracle: by hand."""
    line.let_through(2)
    for _ in range(2):
        outbox.put(0, 0, line.pieces("again", 1))
        outbox.wait(0)
    assert line.arrived == ["again"] * 2
    outbox.put(0, 0, line.pieces("again", 1))
    with pytest.raises(ValueError, match="message 0 is already being sent"):
        outbox.put(0, 0, line.pieces("again", 1))
    line.let_through(1)


def test_a_flush_waits_and_leaves_messages_to_their_waits(line, outbox):
    """Oracle: all pieces are through, and `wait` finds the message still."""
    line.let_through(3)
    outbox.put(0, 0, line.pieces("first", 2))
    outbox.put(1, 0, line.pieces("second", 1))
    outbox.flush()
    assert line.arrived == ["first", "first", "second"]
    outbox.wait(0)
    outbox.wait(1)


def test_what_the_thread_meets_is_raised_wherever_a_message_is_waited_for(outbox):
    """Oracle: the thread's error, also for a message put after the thread's end; no hang."""

    def broken():
        raise OSError("the line is cut")

    for number in (0, 1):
        outbox.put(number, 0, [Piece(1, broken)])
        with pytest.raises(OSError, match="the line is cut"):
            outbox.wait(number)


def test_an_outbox_that_others_leave_alone_is_closed_with_an_error(line, monkeypatch):
    """Oracle: by hand: the first piece is sent, and other ranks never have the second message."""
    monkeypatch.setattr(outbox_module, "PATIENCE", 0.2)
    others = {0}
    box = Outbox(lambda ready: lambda: [number for number in ready if number in others])
    box.put(0, 0, line.pieces("first", 1))
    box.put(1, 0, line.pieces("second", 1))
    threading.Timer(0.1, line.let_through, [1]).start()
    with pytest.raises(UserError, match="other ranks do not take part in the messages"):
        box.close()
    assert line.arrived == ["first"]
    others.add(1)
    line.let_through(1)
    box.close()
    assert line.arrived == ["first", "second"]


def test_nothing_can_be_put_into_a_closed_outbox(line, outbox):
    """Oracle: the error; without the error nobody would send the awaited message."""
    outbox.close()
    told = r"was started after close\(\); do not call step\(\) after close\(\)"
    with pytest.raises(RuntimeError, match=told):
        outbox.put(0, 0, line.pieces("late", 1))
