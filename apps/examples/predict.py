"""Predict the step times of strategies on many nodes, without MPI and without the nodes.

python apps/examples/predict.py
"""

from __future__ import annotations

import mpikfac
from mpikfac.predict import Job, load_machine, simulate
from mpikfac_apps.problems import models

NAMES = ("kfac-opt", "mem-opt", "deferred-sharded")
RANKS = (16, 64, 256)


def main() -> None:
    """Print a table with a row per strategy and a column per number of ranks."""
    machine = load_machine("v100-edr")
    job = Job("resnet50", batch=32, factor_update_steps=10, inv_update_steps=100)
    # mpikfac.layers.covered_shapes(model) returns the layer shapes of any model.
    layers, others = models.shapes_of(job.model)
    print("ms per step   ", *(f"{ranks:>6} ranks" for ranks in RANKS))
    for name in NAMES:
        strategy, settings = mpikfac.get_strategy(name)
        preconditioner = settings.get("preconditioner", "inverse")
        plans = (
            mpikfac.make_plan(layers, ranks, strategy, others, preconditioner) for ranks in RANKS
        )
        steps = (simulate(plan, machine, job).mean for plan in plans)
        print(f"{name:<16}", *(f"{1e3 * step.seconds:12.1f}" for step in steps))


if __name__ == "__main__":
    main()
