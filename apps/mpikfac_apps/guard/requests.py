"""Receive requests for a checkpoint or a stop, from signals, control files and the clock.

    touch RUN/control/checkpoint    write a checkpoint at the next step and continue
    touch RUN/control/stop          write a checkpoint at the next step and stop

To request a stop, `mpikfac launch` writes the reason to a file `stop` in a directory of the job,
because the run directory may not exist yet, and no signal is forwarded by every MPI launcher. A
request may reach only one rank; the caller passes it on to all ranks. Collective over: none.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from mpikfac import files
from mpikfac_apps.guard.reports import screen

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = b"mpikfac: Ctrl-C: stopping after this step, with a checkpoint; again: stop at once\n"
LOOK_EVERY = 1.0  # seconds between two checks for control files
FIRST = 120.0  # maximum seconds until the first checkpoint, so that an early failure costs little
LAUNCHER = "MPIKFAC_LAUNCHER"
"""The variable that names the directory of a `mpikfac launch` job, on the launcher's host."""
RESERVE = 60.0  # seconds between the last checkpoint and the end of the job


def end_of_job(max_minutes: float | None, environ: Mapping[str, str], now: float) -> float | None:
    """Return the unix time at which `max_minutes` or Slurm's limit ends the job; None if unknown.

    Raises:
        ValueError: SLURM_JOB_END_TIME is not a time after `now`.
    """
    ends = [] if max_minutes is None else [now + 60 * max_minutes]
    if text := environ.get("SLURM_JOB_END_TIME"):
        try:
            end = float(text)
        except ValueError:
            end = math.nan
        if not now < end < math.inf:
            raise ValueError(
                f"SLURM_JOB_END_TIME={text} must be a unix time after {now:.0f} (now); "
                "unset it if it belongs to another job"
            )
        ends.append(end)
    return min(ends, default=None)


def ignore_signals() -> None:
    """From now on, ignore the signals that request a stop."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def ignore_one_interrupt() -> None:
    """Ignore the next Ctrl-C, which another rank handles; the one after it ends the process."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: signal.signal(number, signal.SIG_DFL))


class Requests:
    """Requests to this rank to save or stop; poll the properties once per step.

    SIGTERM, SIGUSR1, SIGUSR2 and the first Ctrl-C (SIGINT) request the end of the run. After
    construction, these signals only set a flag. The second Ctrl-C ends the process immediately.

    Args:
        control: the directory of control files, which the constructor creates; None for no control
            files.
        end: the unix time at which the job is killed. A stop is requested early enough to leave
            time for two checkpoints as slow as the slowest one so far, for the longest pause
            between two polls so far, and for `RESERVE` seconds.
        every_minutes: minutes between two checkpoints; the first is due after 2 minutes if that is
            sooner.
        clock: returns the seconds by which all intervals are measured; only `end` is a unix time.
    """

    def __init__(
        self,
        control: Path | None,
        *,
        end: float | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._clock = control, clock
        self._launcher = Path(place) if (place := os.environ.get(LAUNCHER)) else None
        self._end = math.inf if end is None else end
        self._save_interval = math.inf if every_minutes is None else 60 * every_minutes
        self._next_save = math.inf if every_minutes is None else min(FIRST, self._save_interval)
        self._stop = self._checkpoint = ""  # the source of the request
        self._saved, self._looked, self._polled = clock(), -math.inf, math.inf
        self._slowest = self._pause = 0.0
        if control is not None:
            control.mkdir(parents=True, exist_ok=True)
        self._former = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in a background job
            self._former[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)
        for number in self._former:
            # Python makes signals interrupt system calls, which MPI and HDF5 might not expect.
            signal.siginterrupt(number, False)

    @property
    def stop(self) -> bool:
        """Whether the run must write a checkpoint and end."""
        self._poll()
        return self._stop != ""

    @property
    def checkpoint(self) -> bool:
        """Whether a checkpoint is due; reset by `saved`."""
        self._poll()
        return self._checkpoint != ""

    @property
    def reason(self) -> str:
        """The source of the first request, such as "SIGTERM" or "end of job in 95 s"."""
        return self._stop or self._checkpoint

    def saved(self, seconds: float) -> None:
        """Record how long a checkpoint took, even if it failed, and start the next interval."""
        self._checkpoint = ""
        self._saved, self._next_save = self._clock(), self._save_interval
        self._slowest = max(self._slowest, seconds)

    def ignore_signals(self) -> None:
        """Ignore signals that request a stop, even while the interpreter shuts down.

        No Python handler runs during the shutdown, so a late signal would otherwise kill a run that
        has already stopped as requested. The handling of Ctrl-C does not change.
        """
        ignore_signals()
        for number in SIGNALS:
            self._former.pop(number, None)

    def close(self) -> None:
        """Restore the previous handlers, except for signals that `ignore_signals` ignores."""
        for number, handler in self._former.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not installed by Python

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._ask_to_stop(signal.Signals(number).name)

    def _on_interrupt(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # so that even a rank waiting in MPI can be ended
        self._ask_to_stop("Ctrl-C")
        if self._control is not None:
            with suppress(OSError):
                os.write(screen(), INTERRUPTED)

    def _ask_to_stop(self, who: str) -> None:
        self._stop = self._stop or who

    def _ask_to_save(self, who: str) -> None:
        self._checkpoint = self._checkpoint or who

    def _poll(self) -> None:
        now = self._clock()
        self._pause = max(self._pause, now - self._polled)
        self._polled = now
        left = self._end - time.time()
        if left <= 2 * self._slowest + self._pause + RESERVE:
            self._ask_to_stop(f"end of job in {left:.0f} s")
        if now - self._saved >= self._next_save:
            self._ask_to_save(f"{self._next_save / 60:g} minutes")
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Check for the file `stop` of `mpikfac launch`, and for control files."""
        if self._launcher is not None:
            with suppress(OSError):
                self._ask_to_stop(files.read_text(self._launcher / "stop"))
        if self._control is not None:
            taken = _take(self._control)
            if "stop" in taken:
                self._ask_to_stop("control/stop")
            if "checkpoint" in taken:
                self._ask_to_save("control/checkpoint")


def _take(control: Path) -> set[str]:
    """Remove the control files, and return the names of those removed; ignore OS errors."""
    taken = set()
    with suppress(OSError):
        # A listing is always up to date; looking up a name might return a stale, cached answer.
        for name in {"checkpoint", "stop"}.intersection(os.listdir(control)):
            os.unlink(control / name)
            taken.add(name)
    return taken
