"""End the MPI launcher after its job has ended.

Open MPI's mpirun waits for replies from all hosts before it exits. If a host has lost its network,
mpirun would wait until TCP gives up, which takes a quarter of an hour or more.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from mpikfac import files
from mpikfac_apps.guard.lock import born

NAMES = ("prterun", "mpirun", "orterun")  # the names of Open MPI's launcher
TICK = 0.1  # seconds between two checks of the launcher
TERMS = 10  # Open MPI obeys the first SIGTERM, and exits immediately after one or two more


def end_launcher(seconds: float) -> None:
    """End Open MPI's launcher after `seconds`, if it is the parent of this process.

    A separate process waits and sends signals, because the caller is about to exit. The separate
    process exits when the launcher has exited.
    """
    launcher = os.getppid()
    with suppress(OSError):  # for example, if there are no file descriptors left
        is_launcher = files.read_text(f"/proc/{launcher}/comm").strip() in NAMES
        if is_launcher and not os.fork():
            try:
                _ask(launcher, seconds)
            finally:
                os._exit(0)


def _ask(launcher: int, seconds: float) -> None:
    began, first = born(launcher), time.monotonic() + seconds
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the launcher waits until ranks close their pipes
    for count in range(TERMS):
        while time.monotonic() < first + count:
            time.sleep(TICK)
            if born(launcher) != began:
                return
        os.kill(launcher, signal.SIGTERM)
