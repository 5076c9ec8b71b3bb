"""The training program, in which rank 1 raises: python raising.py PLACE OPTIONS..."""

from __future__ import annotations

import sys

import mpikfac
from mpikfac_apps import data, models, train_cnn

PLACES = {
    "start-up": (models, "build"),
    "data": (data, "load"),
    "forward": (train_cnn.F, "cross_entropy"),
    "step": (mpikfac.KFAC, "step"),
    "evaluation": (train_cnn.Run, "evaluate"),
}


def main() -> int:
    place = sys.argv[1]

    def raising(*_: object, **__: object) -> None:
        raise RuntimeError(f"on purpose, in {place}")

    if mpikfac.world().rank == 1:
        setattr(*PLACES[place], raising)
    return train_cnn.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
