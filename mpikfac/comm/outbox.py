"""Messages that are sent beside the computation, the most urgent one first.

Ranks come to have a message ready at different times and in different orders, but have to send all
of them in one order. So a thread on each asks the others, before each piece of a message, what all
have ready, and takes the most urgent of that: a message that comes late overtakes those that were
begun, piece by piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PAUSE = 1e-4  # seconds between two looks at what others do

Piece = Callable[[], None]


@dataclass
class Letter:
    """A message on its way: what sends its pieces, in order."""

    urgency: int
    pieces: list[Piece]
    sent: threading.Event = field(default_factory=threading.Event)


class Outbox:
    """A thread that sends, in the same order on all ranks.

    Messages have a number from 0 on, which means the same message on every rank; the lower its
    urgency, the sooner it is sent.
    """

    def __init__(self, in_common: Callable[[Sequence[int]], list[int]]) -> None:
        """`in_common` gives the numbers that are ready on all ranks; collective, as pieces are."""
        self._in_common = in_common
        self._letters: dict[int, Letter] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpikfac outbox", daemon=True)
        self._thread.start()

    def put(self, number: int, urgency: int, pieces: Sequence[Piece]) -> None:
        """Message `number` is ready on this rank.

        Raises:
            RuntimeError: the outbox is closed.
        """
        letter = Letter(urgency, list(pieces))
        with self._changed:
            if self._closed:
                raise RuntimeError(f"message {number} comes after close(): no step may follow it")
            if number in self._letters:
                raise ValueError(f"message {number} is on its way already")
            self._letters[number] = letter
            if self._error is not None:  # nobody is left to send it: `wait` says why
                letter.sent.set()
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Returns when message `number`, which was put here, is sent on this rank.

        Raises:
            Exception: what the thread met.
        """
        letter = self._letters[number]
        letter.sent.wait()
        if self._error is not None:
            raise self._error
        with self._changed:
            del self._letters[number]

    def close(self) -> None:
        """Ends the thread, once all is sent."""
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
        except BaseException as error:  # it is for the thread that waits
            with self._changed:
                self._error = error
                for letter in self._letters.values():
                    letter.sent.set()

    def _ready(self) -> dict[int, Letter]:
        """Messages that are not sent, waiting until there are some; none when it is closed."""

        def unsent() -> dict[int, Letter]:
            return {n: letter for n, letter in self._letters.items() if not letter.sent.is_set()}

        with self._changed:
            self._changed.wait_for(lambda: unsent() or self._closed)
            return unsent()

    def _send(self, number: int) -> None:
        """Sends one piece."""
        letter = self._letters[number]
        letter.pieces.pop(0)()
        if not letter.pieces:
            letter.sent.set()
