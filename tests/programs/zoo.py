"""Train networks of the zoo on all ranks and in one process: zoo.py NAME...

Rank 0 prints the differences of weights by name and strategy, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import mpikfac
from mpikfac_apps.checking.comparison import differences
from support import zoo

EXAMPLES = 4  # of a rank
STRATEGIES = ("comm-opt", "sharded-optimizer")
STEPS = 4


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    comm = mpikfac.world()
    alone, found = comm.Split(comm.rank), {}
    for name in sys.argv[1:]:
        asked = zoo.asked(name)
        asked.model.load_state_dict(comm.bcast(asked.model.state_dict()))
        found[name] = differences(comm, alone, asked, EXAMPLES, STRATEGIES, STEPS)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
