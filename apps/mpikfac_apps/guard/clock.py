"""A clock that does not count the time during which this process is stopped."""

from __future__ import annotations

import math
import os
import subprocess
import sys

from mpikfac_apps.guard import counter


class Clock:
    """A clock that pauses while this process, or the whole job, is stopped.

    Processes can be stopped by SIGSTOP, Ctrl-Z, Slurm's suspend, `docker pause` or a debugger. A
    separate process (`counter.py`) updates the counted time every 0.1 s.

    Raises:
        OSError: the counting process cannot be started.
    """

    def __init__(self) -> None:
        memory = os.memfd_create("mpikfac clock", os.MFD_CLOEXEC)
        os.ftruncate(memory, 8 * len(counter.NUMBERS))
        self._numbers = counter.shared(memory)
        self.alarm(math.inf)
        command = [sys.executable, "-P", "-S", counter.__file__, str(os.getpid()), str(memory)]
        self._process = subprocess.Popen(
            command,
            pass_fds=[memory],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is meant for the rank
        )
        os.close(memory)

    def __call__(self) -> float:
        """Return the seconds since the clock was started, without those in which it paused."""
        return self._numbers[counter.NOW]

    @property
    def stopped(self) -> float:
        """The seconds for which the clock has paused."""
        return self._numbers[counter.STOPPED]

    @property
    def runs(self) -> bool:
        """Whether the counting process is still running."""
        return self._process.poll() is None

    def alarm(self, time: float) -> None:
        """Set the time by which this process must report or exit; it is killed 3 s later."""
        self._numbers[counter.DEADLINE] = time

    def close(self) -> None:
        """End the counting process."""
        self._process.kill()
        self._process.wait()
