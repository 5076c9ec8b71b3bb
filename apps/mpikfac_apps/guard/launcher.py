"""End the launcher of a job that has ended.

Open MPI's mpirun waits for an answer of all hosts before it leaves. After a host has lost its
network, mpirun would wait for as long as TCP does, a quarter of an hour and more.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from mpikfac import files
from mpikfac_apps.guard.lock import born

NAMES = ("prterun", "mpirun", "orterun")  # of Open MPI's launcher
TICK = 0.1  # seconds between two looks at the launcher
TERMS = 10  # Open MPI obeys the first SIGTERM, and leaves at once after one or two more


def end_launcher(seconds: float) -> None:
    """Ask the launcher to leave, if this process is a child of the launcher, after `seconds`.

    A process of its own waits and asks, because the caller is about to leave. The process leaves
    with the launcher.
    """
    launcher = os.getppid()
    with suppress(OSError):  # for example, no descriptor is left
        is_launcher = files.read_text(f"/proc/{launcher}/comm").strip() in NAMES
        if is_launcher and not os.fork():
            try:
                _ask(launcher, seconds)
            finally:
                os._exit(0)


def _ask(launcher: int, seconds: float) -> None:
    began, first = born(launcher), time.monotonic() + seconds
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the launcher waits for all open pipes of a rank
    for count in range(TERMS):
        while time.monotonic() < first + count:
            time.sleep(TICK)
            if born(launcher) != began:
                return
        os.kill(launcher, signal.SIGTERM)
