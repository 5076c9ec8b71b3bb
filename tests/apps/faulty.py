"""The training program, in which one rank misbehaves: faulty.py KIND PLACE RANK FILE OPTIONS...

FILE then holds the time at which it did.
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

from mpikfac import comm
from mpikfac.engine import bases, decomposers
from mpikfac_apps import checkpoints, data, guard, models, train_cnn

# What a rank does there, and the call at which it misbehaves: the first step may take longer.
PLACES = {
    "start-up": (models, "build", 1),
    "data": (data, "load", 1),
    "forward": (train_cnn.F, "cross_entropy", 2),
    "reduce statistics": (comm.Grid, "exchange", 2),
    "decompose": (bases.Bases, "decompose", 2),
    "publish bases": (comm.Grid, "exchange", 2),
    "curvature": (decomposers, "decompositions", 4),
    "checkpoint": (checkpoints.Saver, "save", 1),
    "evaluation": (train_cnn.Run, "evaluate", 1),
    "end": (guard.Guard, "enter", 1),
}


def at(place: str, name: str, args: Sequence[Any]) -> bool:
    """Whether a call of `name` is at that place: some have arguments that say so."""
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
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hold the GIL": lambda _: re.match("(a+)+b", "a" * 99),
    "miscount": lambda world: world.Allreduce(np.zeros(7), np.zeros(7)),
}


def main(kind: str, place: str, rank: str, file: str, *options: str) -> int:
    """Trains until it happens."""
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
    return train_cnn.main(options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
