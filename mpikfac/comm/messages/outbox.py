"""Send overlapped messages, the most urgent message first.

Messages become ready at different times and in different orders on different ranks, but all ranks
have to send them in the same order. The threads of all ranks therefore determine which messages are
ready on all ranks, and send a batch of them, the most urgent first: small messages, or a piece of a
large one. All ranks agree on the next batch before the current one is sent; the answer arrives in
the meantime. A late urgent message can overtake others between batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from mpikfac.plan import BATCH

PAUSE = 1e-4  # seconds until ranks ask again that have no message in common


class Piece(NamedTuple):
    """Describe a piece of a message: its elements, and the function that sends the piece."""

    size: int
    send: Callable[[], None]


@dataclass
class Letter:
    """Hold a message that is being sent.

    Attributes:
        pieces: the pieces that are not in a batch yet, in order.
        left: the number of pieces that are not sent yet.
    """

    urgency: int
    pieces: list[Piece]
    left: int
    sent: threading.Event = field(default_factory=threading.Event)


Batch = list[tuple[Letter, Piece]]


class Outbox:
    """Run a thread that sends messages in the same order on all ranks.

    Messages are numbered from 0; a number identifies the same message on every rank. Messages with
    lower `urgency` are sent earlier.
    """

    def __init__(self, ask: Callable[[list[int]], Callable[[], list[int]]]) -> None:
        """Start the thread.

        Args:
            ask: starts to determine the numbers that are ready on all ranks, and returns a function
                that waits for them; collective, like pieces.
        """
        self._ask = ask
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
            ValueError: the message is already being sent.
        """
        letter = Letter(urgency, list(pieces), len(pieces))
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
        """Wait until message `number`, which was put before, is sent on this rank.

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
        batch: Batch = []
        try:
            while batch or self._has_waiting():
                # All ranks have the same batch, so all ask now, also those without other messages.
                waiting = self._waiting()
                common = self._ask(list(waiting))
                send(batch)
                batch = next_batch({number: waiting[number] for number in common()})
                if waiting and not batch:
                    time.sleep(PAUSE)
        except BaseException as error:  # raised again by `wait`, in the training's thread
            with self._changed:
                self._error = error
                for letter in self._letters.values():
                    letter.sent.set()

    def _has_waiting(self) -> bool:
        """Wait for waiting messages; return False if there are none and the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting() or self._closed)
            return bool(self._waiting())

    def _waiting(self) -> dict[int, Letter]:
        """Return the messages with pieces that are not in a batch."""
        with self._changed:
            return {number: letter for number, letter in self._letters.items() if letter.pieces}


def next_batch(letters: dict[int, Letter]) -> Batch:
    """Take pieces of the letters: the most urgent first, `BATCH` elements or a single piece."""
    order = sorted(letters, key=lambda number: (letters[number].urgency, number))
    pieces = [(letters[n], piece) for n in order for piece in letters[n].pieces]
    sizes = accumulate(piece.size for _, piece in pieces)
    batch = [entry for entry, size in zip(pieces, sizes) if size <= BATCH] or pieces[:1]
    for letter, _ in batch:
        del letter.pieces[0]
    return batch


def send(batch: Iterable[tuple[Letter, Piece]]) -> None:
    """Send a batch, piece by piece."""
    for letter, piece in batch:
        piece.send()
        letter.left -= 1
        if not letter.left:
            letter.sent.set()
