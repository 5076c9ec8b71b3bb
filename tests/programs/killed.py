"""plain.py, in which a rank is killed SECONDS after the beginning of a step.

killed.py RANK STEP SECONDS OPTIONS...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import mpikfac
from mpikfac_apps.problems import models
from mpikfac_apps.training import train
from plain import plain


class Run(train.Run):
    def step(self, number: int, *batch: Any) -> None:
        rank, step, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
        if (mpikfac.world().rank, number) == (rank, step):
            if seconds:
                signal.setitimer(signal.ITIMER_REAL, seconds)  # killed by the kernel, as by kill -9
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        super().step(number, *batch)


if __name__ == "__main__":
    models.MODELS["plain"] = models.NetworkEntry(plain)
    train.Run = Run
    sys.exit(train.main(sys.argv[4:]))
