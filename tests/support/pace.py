"""The pace of the machine: time limits only catch hangs, and grow on a slow machine.

`jobs/test.sh` times a start of two ranks, and sets MPIKFAC_TEST_PACE to this time divided by the
time on an idle machine. Without the variable, the pace is 1.
"""

from __future__ import annotations

import os

PACE = max(1.0, float(os.environ.get("MPIKFAC_TEST_PACE", "1")))


def paced(seconds: float) -> float:
    """Return a limit in seconds for this machine, from the limit for an idle machine."""
    return PACE * seconds
