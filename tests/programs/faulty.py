"""The training program with a misbehaving rank: faulty.py KIND PLACE RANK FILE OPTIONS...

FILE then holds the time of the fault.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpikfac import comm
from mpikfac.checkpoint import durable
from mpikfac_apps.guard import guard
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.running import checkpoints
from mpikfac_apps.training import batches, train
from mpikfac_apps.training.parts.problem import Problem
from support import inside

# A place's function, and the number of the bad call: the first step may take longer.
PLACES = {
    "start-up": (models, "build", 1),
    "data": (datasets, "load", 1),
    "forward": (batches.Normalise, "__call__", 3),  # the first call looks at the outputs
    "reduce statistics": (comm.Grid, "exchange", 2),
    "decompose": (*inside.PLACES["decompose"], 2),
    "publish bases": (comm.Grid, "exchange", 2),
    "curvature": (*inside.PLACES["decompose for others"], 16),
    "checkpoint": (checkpoints.Saver, "save", 1),
    "write": (durable, "write", 1),
    "evaluation": (Problem, "evaluate", 1),
    "end": (guard.Guard, "enter", 1),
}


def at(place: str, name: str, args: Sequence[Any]) -> bool:
    """Return whether a call of `name` is at `place`; the arguments of some calls name the place."""
    if name == "exchange":
        return any(message.stage == place for message in args[1])
    return name != "enter" or place in args


def fail(_: Any) -> None:
    raise RuntimeError("on purpose")


KINDS: dict[str, Callable[[Any], object]] = {
    "raise": fail,
    "exit": lambda _: sys.exit(0),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda _: ctypes.string_at(0),
    "leave": lambda _: os._exit(0),
    "sleep": lambda _: time.sleep(600),
    "linger": lambda _: time.sleep(1),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hold the GIL": lambda _: re.match("(a+)+b", "a" * 99),
    "miscount": lambda world: world.Allreduce(np.zeros(7), np.zeros(7)),
}


def main(kind: str, place: str, rank: str, file: str, *options: str) -> int:
    """Train until the fault."""
    owner, name, call = PLACES[place]
    original, calls = getattr(owner, name), count(1)

    @wraps(original)
    def faulty(*args: Any, **more: Any) -> Any:
        if at(place, name, args) and next(calls) == call:
            if name == "enter":
                original(*args, **more)
            Path(file).write_text(str(time.time()))
            KINDS[kind](args[0].world if owner is comm.Grid else comm.world())
        return original(*args, **more)

    if comm.world().rank == int(rank):
        setattr(owner, name, faulty)
    return train.main(options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
