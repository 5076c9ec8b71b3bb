"""Run the training program several times in a single job: several.py RUNS.json.

RUNS.json holds `[ranks, options]` of every run; the first `ranks` ranks of the job take part.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import mpikfac
from mpikfac_apps.guard.ranks import watched
from mpikfac_apps.problems import airbench, models
from mpikfac_apps.training import settings, train
from plain import NETWORKS


def main() -> None:
    models.MODELS.update(NETWORKS)
    narrow = partial(airbench.Airbench, widths=(8, 16, 16))
    models.MODELS["airbench_small"] = models.NetworkEntry(narrow, fixed=True, draw=airbench.dirac)
    comm = mpikfac.world()
    for ranks, options in json.loads(Path(sys.argv[1]).read_text()):
        team = comm.Split(comm.rank < ranks, comm.rank)
        if comm.rank < ranks:
            with watched(team) as watchdog:
                train.train(team, settings.of_start(options, team.size), watchdog)
        done = comm.Ibarrier()
        while not done.Test():  # a Barrier would take cores from the ranks that train
            time.sleep(0.01)


if __name__ == "__main__":
    main()
