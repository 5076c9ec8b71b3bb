"""Run an MPI job to its end, and convert Ctrl-C and SIGTERM into requests to stop.

MPI launchers kill all ranks on Ctrl-C. The launcher therefore runs in a separate session, and this
process receives the signals.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpikfac import files
from mpikfac_apps.guard.processes import processes_with, ranks_of, send
from mpikfac_apps.guard.requests import LAUNCHER, SIGNALS
from mpikfac_apps.launching.notes import Output

LOOK_EVERY = 0.1  # seconds
GRACE = 3.0  # seconds for the MPI launcher to end its ranks
SET_DEATH_SIGNAL = 1  # an option of prctl
AGAIN = "the next Ctrl-C ends all ranks immediately"


@dataclass(frozen=True)
class Order:
    """A job to run.

    Attributes:
        command: the MPI launcher, its options, and the program that each rank runs.
        program: the program that each rank runs (the last part of `command`).
        environment: the job's environment variables.
        directory: a directory for this job alone, in which ranks look for a request to stop.
        saves: whether the program responds to a request to stop by saving a checkpoint; if not,
            SIGTERM is sent to all ranks instead.
    """

    command: Sequence[str]
    program: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    saves: bool


class MpiJob:
    """A running job; call `wait` to wait until it has ended."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests: list[signal.Signals] = []  # signals to this process, in order
        self._answered = 0  # the number of `_requests` that have been handled
        self._killed_at = 0.0  # monotonic time at which the job was told to end at once; 0 if never
        self._former = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGHUP, *SIGNALS)
            if signal.getsignal(number) != signal.SIG_IGN  # ignored in a background job
        }
        output, error = (_stream(number) for number in (1, 2))
        self._process = subprocess.Popen(
            order.command,
            env={**order.environment, LAUNCHER: str(order.directory)},
            stdin=subprocess.DEVNULL if os.isatty(0) else None,  # only the shell reads a terminal
            stdout=output[1],
            stderr=error[1],
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (there is no other thread)
        )
        self._outputs = {output[0]: Output(1), error[0]: Output(2)}
        for descriptor in (output[1], error[1]):
            os.close(descriptor)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._requests.append(signal.Signals(number))

    def wait(self) -> int:
        """Wait for the job, and return its exit code; see `_code`."""
        with selectors.DefaultSelector() as selector:
            for descriptor in self._outputs:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._process.poll() is None:
                self._pass_output(selector, LOOK_EVERY)
                self._answer()
            while selector.get_map() and self._pass_output(selector, 0):
                pass
        for descriptor, output in self._outputs.items():
            output.release(at_end=True)
            os.close(descriptor)
        if self._process.returncode:
            send(signal.SIGKILL, list(processes_with(self._variable)))
        for number, handler in self._former.items():
            signal.signal(number, handler)
        return self._code()

    @property
    def _variable(self) -> str:
        return f"{LAUNCHER}={self._order.directory}"

    def _pass_output(self, selector: selectors.BaseSelector, seconds: float) -> bool:
        """Forward what the job writes within `seconds`; return whether it wrote anything."""
        ready = selector.select(seconds)
        for key, _ in ready:
            try:
                content = os.read(key.fd, 2**16)
            except OSError:  # the other end of a terminal is closed
                content = b""
            if content:
                self._outputs[key.fd].feed(content)
            else:
                selector.unregister(key.fd)
        for output in self._outputs.values():
            output.release()
        return bool(ready)

    def _answer(self) -> None:
        """Process the signals received so far, and kill processes that have not exited in time."""
        while self._answered < len(self._requests):
            number = self._requests[self._answered]
            self._answered += 1
            if self._answered == 1:
                self._ask(number)
            elif number == signal.SIGINT:
                self._end()
        if self._killed_at and time.monotonic() > self._killed_at + GRACE:
            send(signal.SIGKILL, list(processes_with(self._variable)))

    def _ask(self, number: signal.Signals) -> None:
        """Ask the program to stop."""
        if self._order.saves:
            files.write_text(self._order.directory / "stop", _named(number))
            say(f"{_named(number)}: the run stops after a step, with a checkpoint; {AGAIN}")
            return
        say(f"{_named(number)}: sending SIGTERM to all ranks; {AGAIN}")
        ranks = ranks_of(self._variable, self._order.program)
        send(signal.SIGTERM, ranks or [self._process.pid])

    def _end(self) -> None:
        """End the job immediately."""
        self._killed_at = self._killed_at or time.monotonic()
        self._process.terminate()

    def _code(self) -> int:
        """Return the exit code; print why the job has ended, unless the program has done so."""
        code, output = self._process.returncode, self._outputs.values()
        killed = next((stream.killed for stream in output if stream.killed), None)
        if not code:
            return 0
        if self._killed_at or (killed and self._requests):
            return 128 + self._requests[0]
        if killed:
            words = {name: (word or b"").decode() for name, word in killed.groupdict().items()}
            number = int(words["signal"] or words["number"])
            who = f"rank {words['rank']} on {words['node']}" if words["rank"] else "a rank"
            say(f"{who} was ended by signal {number} ({signal.strsignal(number)})")
            return 128 + number
        if not (self._requests or any(stream.spoken for stream in output)):
            say(f"the program ended with code {code}")
        return code if code > 0 else 128 - code


def say(text: str) -> None:
    """Print a line that begins with `mpikfac launch`."""
    with suppress(OSError):  # the terminal is gone
        print(files.printable(f"mpikfac launch: {text}"), file=sys.stderr, flush=True)


def _named(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


def _stream(descriptor: int) -> tuple[int, int]:
    """Return the read end and the write end of a stream that is forwarded to a descriptor.

    If the descriptor is a terminal, so is the stream: programs show progress only on a terminal.
    """
    if not os.isatty(descriptor):
        return os.pipe()
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    return ours, theirs


def _end_with_parent() -> None:
    """Make the system send SIGTERM to the MPI launcher if this program is killed."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
