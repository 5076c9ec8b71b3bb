"""The training program, half a second slower in every step until a file `hurry` exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mpikfac_apps.training import train
from mpikfac_apps.training.run import Run

step = Run.step


def slow_step(run: Run, *batch: Any) -> None:
    step(run, *batch)
    if not Path("hurry").exists():
        time.sleep(0.5)


if __name__ == "__main__":
    Run.step = slow_step
    sys.exit(train.main())
