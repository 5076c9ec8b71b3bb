"""Decode images for a rank, in a separate process: worker.py CONNECTION MEMORY SHAPE...

The process loads neither MPI nor torch. It ends when the connection to the rank is closed, which
also happens if the rank is killed. It ignores signals, which are meant for the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import numpy as np

from mpikfac_apps.images.listing import ImagePlace

SET_DEATH_SIGNAL = 1  # an option of prctl
DecodeJob = tuple[int, ImagePlace, tuple[int, ...] | None]
"""An image's index in a batch, its location, and the seed of a random crop (None: central)."""
Work = tuple[int, int, Sequence[DecodeJob]]
"""The ticket of a list of images, the memory slot for their pixels, and the list."""
Fault = tuple[int, str]
"""The index of a broken image in a batch, and the reason why it cannot be decoded."""


def main() -> None:
    """Decode lists of images until the rank closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Closing the connection would not end a suspended process.
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    connection, memory, *shape = map(int, sys.argv[1:])
    slots = slots_of(memory, shape)
    lists: SimpleQueue[Work | None] = SimpleQueue()
    with Connection(connection) as rank:
        # A separate thread receives lists. Otherwise, a rank that sends a long list and a process
        # that sends a long result would wait for each other.
        Thread(target=receive, args=(rank, lists), daemon=True).start()
        with suppress(ConnectionError):
            while work := lists.get():
                ticket, slot, jobs = work
                rank.send((ticket, fill(slots[slot], jobs)))


def receive(rank: Connection, lists: SimpleQueue[Work | None]) -> None:
    """Put lists of images into the queue, and None after the rank has closed the connection."""
    with suppress(EOFError, OSError):
        while True:
            lists.put(rank.recv())
    lists.put(None)


def slots_of(memory: int, shape: Sequence[int]) -> np.ndarray:
    """Return the memory that the rank and its processes share, bytes `[slots, images, h, w, 3]`."""
    return np.frombuffer(mmap.mmap(memory, 0), np.uint8).reshape(shape)


def fill(slot: np.ndarray, jobs: Sequence[DecodeJob]) -> list[Fault]:
    """Decode images into a slot `[images, h, w, 3]`, and return the broken images."""
    from mpikfac_apps.images.decoding import Broken, decoded

    faults = []
    for position, place, draw in jobs:
        try:
            slot[position] = decoded(place, slot.shape[1], draw)
        except Broken as error:
            faults.append((position, str(error)))
    return faults


if __name__ == "__main__":
    main()
