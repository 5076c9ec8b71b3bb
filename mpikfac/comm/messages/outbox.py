"""Send overlapped messages, the most urgent message first.

Messages become ready at different times and in different orders on different ranks, but all ranks
have to send messages in the same order. Before every piece of a message, the threads of all ranks
find the messages ready on all ranks, and send a piece of the most urgent common message. So a late
urgent message overtakes messages already under way, between 2 pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PAUSE = 1e-4  # seconds between two looks at the other ranks' messages

Piece = Callable[[], None]


@dataclass
class Letter:
    """Hold a message under way: the functions that send the remaining pieces, in order."""

    urgency: int
    pieces: list[Piece]
    sent: threading.Event = field(default_factory=threading.Event)


class Outbox:
    """Run a thread that sends messages in the same order on all ranks.

    Messages are numbered from 0 on; a number means the same message on every rank. Messages of
    lower `urgency` are sent sooner.
    """

    def __init__(self, in_common: Callable[[Sequence[int]], list[int]]) -> None:
        """Start the thread.

        Args:
            in_common: returns the numbers that are ready on all ranks; collective, as pieces are.
        """
        self._in_common = in_common
        self._letters: dict[int, Letter] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpikfac outbox", daemon=True)
        self._thread.start()

    def put(self, number: int, urgency: int, pieces: Sequence[Piece]) -> None:
        """Mark message `number` as ready on this rank.

        Raises:
            RuntimeError: the outbox is closed.
            ValueError: the message is already under way.
        """
        letter = Letter(urgency, list(pieces))
        with self._changed:
            if self._closed:
                raise RuntimeError(f"message {number} comes after close(): no step may follow it")
            if number in self._letters:
                raise ValueError(f"message {number} is on its way already")
            self._letters[number] = letter
            if self._error is not None:  # the thread has ended: `wait` raises its error
                letter.sent.set()
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until message `number`, put in before, is sent on this rank.

        Raises:
            Exception: the error that ended the thread.
        """
        letter = self._letters[number]
        letter.sent.wait()
        if self._error is not None:
            raise self._error
        with self._changed:
            del self._letters[number]

    def flush(self) -> None:
        """Wait until all messages put in so far are sent on this rank."""
        with self._changed:
            letters = list(self._letters.values())
        for letter in letters:
            letter.sent.wait()

    def close(self) -> None:
        """End the thread, once all messages are sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while ready := self._ready():
                if common := self._in_common(list(ready)):
                    self._send(min(common, key=lambda number: (ready[number].urgency, number)))
                else:
                    time.sleep(PAUSE)
        except BaseException as error:  # raised again by `wait`, in the training's thread
            with self._changed:
                self._error = error
                for letter in self._letters.values():
                    letter.sent.set()

    def _ready(self) -> dict[int, Letter]:
        """Wait for unsent messages; return none if all are sent and the outbox is closed."""

        def unsent() -> dict[int, Letter]:
            return {n: letter for n, letter in self._letters.items() if not letter.sent.is_set()}

        with self._changed:
            self._changed.wait_for(lambda: unsent() or self._closed)
            return unsent()

    def _send(self, number: int) -> None:
        """Send the next piece of message `number`."""
        letter = self._letters[number]
        letter.pieces.pop(0)()
        if not letter.pieces:
            letter.sent.set()
