"""The training program with half a second more in each step until there is a file `hurry`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from mpikfac_apps import train_cnn

step = train_cnn.Run.step


def slow_step(run: train_cnn.Run, *batch: Any) -> None:
    step(run, *batch)
    if not Path("hurry").exists():
        time.sleep(0.5)


if __name__ == "__main__":
    train_cnn.Run.step = slow_step
    sys.exit(train_cnn.main())
