"""Start the processes that decode images for a rank, and distribute images among them.

Each process is a new Python interpreter that runs `worker.py`: `fork` would copy the state of MPI,
and `multiprocessing` would run the main program again. Decoded pixels are stored in memory that has
no name in the file system, so a killed rank leaves nothing behind. Workers of torch's DataLoader
would load torch in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Protocol

import numpy as np

import mpikfac
from mpikfac_apps.images.worker import DecodeJob, Fault, fill, slots_of

TRAINING = (0, 1, 2, 3)  # memory slots for the next training batches
REST = 4  # the slot for images of an evaluation or of a sample
OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_")  # variables by which MPI recognises a rank
# glibc reuses the memory of an image for the next one, which saves a third of the CPU time.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**27), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
PATIENCE = 10.0  # seconds to wait for a process to exit


class _Worker(Protocol):
    """The interface of image decoders, which process lists of images in the order of tickets."""

    def begin(self, ticket: int, slot: int, jobs: Sequence[DecodeJob]) -> None: ...

    def faults(self, ticket: int) -> list[Fault]: ...

    def close(self) -> None: ...


class Decoders:
    """Decode lists of images into shared memory, using several processes.

    Args:
        workers: the number of processes; with 0, the calling process decodes when a result is
            requested.
        size: the side length in pixels of a decoded image.
        room: the maximum number of images in a list.
    """

    def __init__(self, workers: int, size: int, room: int) -> None:
        shape = (REST + 1, room, size, size, 3)
        memory = os.memfd_create("mpikfac images", os.MFD_CLOEXEC)
        os.ftruncate(memory, int(np.prod(shape)))  # pages use memory only once they are written
        self._slots = slots_of(memory, shape)
        self._workers: list[_Worker] = [_Process(memory, shape) for _ in range(workers)]
        os.close(memory)
        if not workers:
            self._workers = [_Here(self._slots)]
        self._ticket = 0

    def begin(self, slot: int, jobs: Sequence[DecodeJob]) -> int:
        """Start decoding a list of images into a slot, and return a ticket for the result."""
        self._ticket += 1
        for number, worker in enumerate(self._workers):
            worker.begin(self._ticket, slot, jobs[number :: len(self._workers)])
        return self._ticket

    def faults(self, ticket: int) -> list[Fault]:
        """Wait until the images of a ticket are decoded, and return the broken images in order."""
        return sorted(fault for worker in self._workers for fault in worker.faults(ticket))

    def pixels(self, slot: int, images: int) -> np.ndarray:
        """Return the first images of a slot, bytes `[images, h, w, 3]`, without copying."""
        return self._slots[slot, :images]

    def close(self) -> None:
        """End the decoding processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Process:
    """A process that decodes images.

    Raises:
        UserError: the process has exited, for example because it ran out of memory.
    """

    def __init__(self, memory: int, shape: tuple[int, ...]) -> None:
        self._connection, theirs = Pipe()
        passed = theirs.fileno(), memory
        environment = KEEP | {k: v for k, v in os.environ.items() if not k.startswith(OF_MPI)}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpikfac_apps.images.worker", *map(str, (*passed, *shape))],
            pass_fds=passed,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the rank
        )
        theirs.close()
        self._faults: dict[int, list[Fault]] = {}

    def begin(self, ticket: int, slot: int, jobs: Sequence[DecodeJob]) -> None:
        try:
            self._connection.send((ticket, slot, jobs))
        except OSError as error:
            raise self._ended() from error

    def faults(self, ticket: int) -> list[Fault]:
        try:
            while ticket not in self._faults:
                done, faults = self._connection.recv()
                self._faults[done] = faults
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return self._faults.pop(ticket)

    def _ended(self) -> mpikfac.UserError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        return mpikfac.UserError(
            f"an image decoder has ended with code {self._process.returncode}; "
            f"it may have run out of memory: try fewer data.workers"
        )

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # for example, if a file system hangs
            self._process.kill()


class _Here:
    """Decode images in the calling process, when their faults are requested."""

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots
        self._begun: dict[int, tuple[int, Sequence[DecodeJob]]] = {}

    def begin(self, ticket: int, slot: int, jobs: Sequence[DecodeJob]) -> None:
        self._begun[ticket] = slot, jobs

    def faults(self, ticket: int) -> list[Fault]:
        slot, jobs = self._begun.pop(ticket)
        return fill(self._slots[slot], jobs)

    def close(self) -> None:
        self._begun = {}
