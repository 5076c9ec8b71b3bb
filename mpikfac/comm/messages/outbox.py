"""Send overlapped messages in order of urgency.

Messages become ready at different times and in different orders on different ranks, but all ranks
must send them in the same order. The sending threads therefore determine together which messages
are ready on every rank, and send the most urgent of them as a batch: several small messages, or a
piece of a large one. They agree on the next batch while the current one is being sent. Between two
batches, an urgent message can overtake those that were ready earlier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from mpikfac.errors import UserError
from mpikfac.plan import BATCH

PAUSE = 1e-4  # seconds before the ranks try again if no message is ready on all of them
PATIENCE = 60.0  # `close` stops waiting after this many seconds without a sent piece


class Piece(NamedTuple):
    """A piece of a message: its number of elements, and the function that sends it."""

    size: int
    send: Callable[[], None]


@dataclass
class Letter:
    """A message that is being sent.

    Attributes:
        pieces: the pieces that are not in a batch yet, in order.
        left: the number of pieces that have not been sent.
    """

    urgency: int
    pieces: list[Piece]
    left: int
    sent: threading.Event = field(default_factory=threading.Event)


Batch = list[tuple[Letter, Piece]]


class Outbox:
    """Run a thread that sends messages in the same order on all ranks.

    Messages are numbered from 0, and a message has the same number on every rank. Messages with a
    lower `urgency` are sent first.
    """

    def __init__(self, ask: Callable[[list[int]], Callable[[], list[int]]]) -> None:
        """Start the thread.

        Args:
            ask: starts to determine which messages are ready on all ranks, and returns a function
                that waits for the answer. Like the pieces' `send`, it is collective.
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
                raise RuntimeError(
                    f"message {number} was started after close(); do not call step() after close()"
                )
            if number in self._letters:
                raise ValueError(f"message {number} is already being sent")
            self._letters[number] = letter
            if self._error is not None:  # the thread has ended: `wait` raises its error
                letter.sent.set()
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until this rank has sent message `number`, which was passed to `put` before.

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
        """Wait until this rank has sent all messages passed to `put` so far."""
        with self._changed:
            letters = list(self._letters.values())
        for letter in letters:
            letter.sent.wait()

    def close(self) -> None:
        """End the thread once all messages are sent.

        Raises:
            UserError: other ranks do not take part in one of this rank's messages, for example
                after an error on one of them.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive():
            left = self._left()
            self._thread.join(PATIENCE)
            if self._thread.is_alive() and left == self._left():
                raise UserError(
                    f"close() has waited for {PATIENCE:g} s: other ranks do not take part in the "
                    f"messages of this rank's last backward pass; run the same passes on all "
                    f"ranks, and end the job after an error on one of them"
                )

    def _left(self) -> int:
        """Return the number of pieces that have not been sent."""
        with self._changed:
            return sum(letter.left for letter in self._letters.values())

    def _run(self) -> None:
        batch: Batch = []
        try:
            while batch or self._has_waiting():
                # All ranks have the same batch, so all take part, even those with no message
                # waiting.
                waiting = self._waiting()
                common = self._ask(list(waiting))
                send(batch)
                batch = next_batch({number: waiting[number] for number in common()})
                if waiting and not batch:
                    time.sleep(PAUSE)
        except BaseException as error:  # `wait` raises it again in the training thread
            with self._changed:
                self._error = error
                for letter in self._letters.values():
                    letter.sent.set()

    def _has_waiting(self) -> bool:
        """Wait for a message; return False if none is left and the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting() or self._closed)
            return bool(self._waiting())

    def _waiting(self) -> dict[int, Letter]:
        """Return the messages with pieces that are not in a batch yet, by number."""
        with self._changed:
            return {number: letter for number, letter in self._letters.items() if letter.pieces}


def next_batch(letters: dict[int, Letter]) -> Batch:
    """Take the most urgent pieces of `letters`, up to `BATCH` elements, but at least one piece."""
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
