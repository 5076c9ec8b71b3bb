"""The thread that sends the most urgent message first; prepared answers replace further ranks."""

from __future__ import annotations

import threading

import pytest

from mpikfac.comm.messages.outbox import Outbox
from support.pace import paced


class Line:
    """A line on which pieces arrive, piece by piece, when the test lets pieces through."""

    def __init__(self):
        self.arrived = []
        self.gate = threading.Semaphore(0)

    def pieces(self, name, count):
        def piece():
            assert self.gate.acquire(timeout=paced(10))
            self.arrived.append(name)

        return [piece] * count

    def let_through(self, count):
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def outbox():
    box = Outbox(list)  # all ranks have the same messages ready
    yield box
    box.close()


def test_an_urgent_message_overtakes_one_that_was_begun(line, outbox):
    """Oracle: by hand: the piece on the line ends, then the urgent message, then the rest."""
    begun = threading.Event()
    outbox.put(0, 5, [begun.set, *line.pieces("slow", 3)])
    assert begun.wait(10)
    outbox.put(1, 1, line.pieces("urgent", 2))
    line.let_through(5)
    outbox.wait(0)
    outbox.wait(1)
    assert sorted(line.arrived) == ["slow"] * 3 + ["urgent"] * 2
    assert line.arrived.index("urgent") <= 1
    assert line.arrived[-2:] == ["slow", "slow"]


def test_of_equally_urgent_messages_the_lower_number_goes_first(line):
    """Oracle: by hand; nothing is sent until all ranks have both messages."""
    everywhere = threading.Event()
    outbox = Outbox(lambda ready: list(ready) if everywhere.is_set() else [])
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
    outbox = Outbox(lambda ready: [number for number in ready if number in theirs])
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
    with pytest.raises(ValueError, match="message 0 is on its way already"):
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
        outbox.put(number, 0, [broken])
        with pytest.raises(OSError, match="the line is cut"):
            outbox.wait(number)


def test_nothing_can_be_put_into_a_closed_outbox(line, outbox):
    """Oracle: the error; without the error nobody would send the awaited message."""
    outbox.close()
    with pytest.raises(RuntimeError, match=r"comes after close\(\): no step may follow it"):
        outbox.put(0, 0, line.pieces("late", 1))
