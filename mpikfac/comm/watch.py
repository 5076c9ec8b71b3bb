"""Watch a rank's steps from a thread, and end the job if ranks can never meet in a step.

A rank that waits for others waits inside MPI, where it cannot report anything, so a thread checks
once a second. A rank that has been in the same step for `LONG` seconds, or has finished, sends its
position to the next rank, and a waiting rank compares the position of the previous rank with its
own. If ranks cannot meet, the positions of at least two neighbours differ. As long as steps are
fast, nothing is sent.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

from mpikfac.comm.job import Comm, survives
from mpikfac.comm.mpi import MPI
from mpikfac.errors import CRASH, USAGE_ERROR, UserError, looks

LOOK = 1.0  # seconds between two checks
LONG = 10.0  # seconds in a step before a rank sends its position
WAIT = 60.0  # seconds before a wait is reported; ranks can finish at different times
LEAVE = 2.0  # seconds for all ranks to write their stack traces
TIMEOUT = "MPIKFAC_WATCHDOG_TIMEOUT"
"""The environment variable for the timeout: a job ends after this many seconds without a step."""


class Place(NamedTuple):
    """The position of a rank in the program: the step that it is in, or the end.

    Attributes:
        trainer: the number of the trainer that takes the step, or -1 at the end of the program.
        arguments: the arguments of the step on which ranks must agree, as strings.
        met: whether all ranks of the job take part in the step.
    """

    trainer: int
    name: str
    step: int
    arguments: Mapping[str, str]
    met: bool = True

    def __str__(self) -> str:
        return f"step {self.step} of {self.name}"

    def meets(self, other: Place) -> bool:
        """Return whether two ranks at these positions are in the same step."""
        return self[:3] == other[:3]


ENDED = Place(-1, "", 0, {})
STACKS = Place(-2, "", 0, {})
"""The positions that a rank sends when it has finished, and when the timeout ends the job."""


class WatchedSteps:
    """The steps of a trainer, as seen by the rank's watch."""

    def __init__(self, comm: Comm, name: str) -> None:
        """Register a trainer with this rank's watchdog thread.

        Collective over: comm; also world, for the first trainer that includes all ranks of world.

        Args:
            comm: the ranks that train together.
            name: the trainer's name in messages.
        """
        self._watch, self._name = _watch(os.getpid()), name
        self._met = 1 < comm.size == MPI.COMM_WORLD.size and not survives()
        self._watch.start(comm, self._met)
        self._trainer = self._watch.trainers

    @contextmanager
    def taking(self, step: int, arguments: Mapping[str, object]) -> Iterator[None]:
        """Return a context in which the rank takes a step with the given arguments.

        Args:
            arguments: the arguments on which all ranks must agree.

        Raises:
            UserError: another rank sends messages of a different size.
        """
        texts = {name: repr(value) for name, value in arguments.items()}
        self._watch.move(Place(self._trainer, self._name, step, texts, self._met))
        try:
            yield
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            given = ", ".join(f"{name}={text}" for name, text in texts.items())
            raise UserError(
                f"step {step} of {self._name}: another rank sends messages of a different size; "
                f"call step() with the same arguments on all ranks; this rank has {given}"
            ) from error
        finally:
            self._watch.move(None)


class Watch:
    """Watch the steps of a rank.

    Attributes:
        trainers: the number of trainers registered so far.
    """

    def __init__(self, process: int) -> None:
        self.trainers = 0
        self._process = process
        self._rank, self._size = 0, 1
        self._limit = _limit()
        self._place: Place | None = None
        self._moves = 0
        self._before: Place | None = None  # the latest position that the previous rank has sent
        self._ring: MPI.Intracomm | None = None
        self._sent: list[MPI.Request] = []
        self._told = self._failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpikfac watch", daemon=True)

    def start(self, comm: Comm, met: bool) -> None:
        """Register a trainer; start the thread if this is the first trainer that needs it.

        Args:
            comm: the ranks that train together.
            met: whether all ranks of the job take part in the trainer's steps.
        """
        if not self.trainers:  # stored, so that a failing thread need not query MPI
            ranks = MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else comm
            self._rank, self._size = ranks.rank, ranks.size
        self.trainers += 1
        self.move(None)
        threads = met and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if (threads or self._limit) and not self._thread.is_alive() and not self._closed.is_set():
            self._thread.start()  # before `Dup`, because other ranks may never create a trainer
        if met and self._ring is None:
            self._ring = MPI.COMM_WORLD.Dup()
            atexit.register(self._end_program)
            sys.excepthook = partial(self._on_failure, sys.excepthook)

    def move(self, place: Place | None) -> None:
        """Record that the rank is in a step or, with None, between two steps."""
        self._moves += 1
        self._place = place

    def _on_failure(self, report: Callable[..., None], *failure: Any) -> None:
        """Record that an exception ends the program, and call `report`, the previous excepthook."""
        self._failed = True
        report(*failure)

    def _run(self) -> None:
        try:
            self._look_until_closed()
        except Exception as error:
            about = " ".join(f"{type(error).__name__}: {error}".split())
            _print(
                f"the watchdog thread of rank {self._rank} has failed, so hangs are no longer "
                f"detected: {about}"
            )

    def _look_until_closed(self) -> None:
        moves, still, sent = -1, 0.0, False
        while not self._closed.wait(LOOK):
            place = self._place
            self._receive()
            if self._moves != moves:
                moves, still, sent = self._moves, 0.0, False
                continue
            still += LOOK
            if self._ring is not None and place is not None and place.met and still >= LONG:
                if not sent:
                    self._send(place)
                    sent = True
                self._compare(place, still)
            if self._limit and still >= self._limit:
                self._end_at_limit(place)

    def _send(self, place: Place, every: bool = False) -> None:
        """Send a position to the next rank or, if `every`, to every other rank."""
        if self._ring is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            rank, size = self._ring.rank, self._ring.size
            for to in range(1, size) if every else (1,):
                self._sent.append(self._ring.isend(tuple(place), (rank + to) % size))
            self._sent = [request for request in self._sent if not request.Test()]

    def _receive(self) -> None:
        """Receive the positions that other ranks have sent."""
        while self._ring is not None and self._ring.iprobe():
            place = Place(*self._ring.recv())
            if place != STACKS:
                self._before = place
            elif self._limit:
                self._limit = None  # the sender ends the job
                self._write_stacks("another rank has reached the timeout")

    @property
    def _previous(self) -> int:
        assert self._ring is not None
        return (self._ring.rank - 1) % self._ring.size

    def _compare(self, place: Place, still: float) -> None:
        """End the job if the previous rank cannot take part in this step; report a long wait."""
        rank, previous, before = MPI.COMM_WORLD.rank, self._previous, self._before
        if before == ENDED:
            _abort(
                f"rank {previous} has ended, and rank {rank} waits in {place}; unless rank "
                f"{previous} has failed, give all ranks the same number of steps"
            )
        if before is not None and before.meets(place):
            for name, text in place.arguments.items():
                if before.arguments[name] != text:
                    _abort(
                        f"ranks disagree on {name} in {place}: {before.arguments[name]} on rank "
                        f"{previous}, {text} on rank {rank}; call step() with the same arguments "
                        f"on all ranks"
                    )
        elif still >= WAIT and not self._told:
            self._told = True
            _print(
                f"rank {rank} has waited in {place} for {WAIT:g} s, and rank {previous} has not "
                f"reached it; if rank {previous} waits elsewhere, call the same methods on all "
                f"ranks; {TIMEOUT}=600 ends such a job and prints the stacks of all ranks"
            )

    def _end_at_limit(self, place: Place | None) -> NoReturn:
        where = "between two steps" if place is None else f"in {place}"
        try:
            self._write_stacks(f"no progress for {self._limit:g} s, {where}")
            self._send(STACKS, every=True)
            time.sleep(LEAVE + LOOK)
        finally:  # also if stderr is closed
            os._exit(CRASH)

    def _write_stacks(self, why: str) -> None:
        """Print this rank's stack traces, preceded by `why`, the reason."""
        stacks = "\n".join(_stacks())
        _print(f"rank {self._rank} of {self._size}, {platform.node()}: {why}; stacks:\n{stacks}")

    def _end_program(self) -> None:
        """At the end of the program, wait for the previous rank, which may still need this one.

        If an exception ends the program, end the job.
        """
        if MPI.Is_finalized() or os.getpid() != self._process:  # a forked process is not a rank
            return
        if self._failed:
            sys.stdout.flush()
            MPI.COMM_WORLD.Abort(CRASH)
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        assert self._ring is not None
        sent = self._ring.isend(tuple(ENDED), (self._ring.rank + 1) % self._ring.size)
        if not any(self._previous_ended() for _ in looks(WAIT)):
            _print(
                f"rank {self._ring.rank} ended {WAIT:g} s ago, but rank {self._previous} has not; "
                f"if it waits for this rank, end the job, and give all ranks the same number of "
                f"steps and the same calls"
            )
            while not self._previous_ended():
                time.sleep(0.1)
        sent.Wait()

    def _previous_ended(self) -> bool:
        self._receive()
        return self._before == ENDED


@cache
def _watch(process: int) -> Watch:
    """Return the watch of this process."""
    return Watch(process)


def _limit() -> float | None:
    """Return the timeout that the environment sets, in seconds; None if it sets none.

    Raises:
        UserError: `MPIKFAC_WATCHDOG_TIMEOUT` is not a positive number below 1e9.
    """
    text = os.environ.get(TIMEOUT)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UserError(f"{TIMEOUT}={text} must be a number of seconds > 0")
    return seconds


def _stacks() -> Iterator[str]:
    """Return the stack traces of all threads, line by line; no file is read or written."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        yield f"Thread {names.get(thread, thread)} (most recent call first):"
        for place, line in traceback.walk_stack(frame):
            code = place.f_code
            yield f'  File "{code.co_filename}", line {line} in {code.co_name}'


def _abort(text: str) -> None:
    """Print a line and end the job."""
    _print(text)
    MPI.COMM_WORLD.Abort(USAGE_ERROR)


def _print(text: str) -> None:
    """Print in a single write, because a launcher can insert its own output between two writes."""
    end = "" if text.endswith("\n") else "\n"
    print(f"mpikfac: {text}{end}", end="", file=sys.stderr, flush=True)
