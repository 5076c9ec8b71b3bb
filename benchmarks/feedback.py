"""Measure the time that overlapped messages hide under direct feedback and back-propagation.

    bash jobs/emulated_cluster.sh up 2 --rate 100mbit
    export PYTHONPATH=tests
    bash jobs/emulated_cluster.sh run python -m mpi4py benchmarks/feedback.py --data DIRECTORY

Optimizers are SGD and K-FAC without G, whose bases do not change; factors are updated in every
step. Groups of steps of all methods alternate; times are medians over rounds, as in
`benchmarks/overlap.py`.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cluster import Images
from overlap import STAGES, Step, timed

import mpikfac
from mpikfac import CommOpt, Strategy, Transport
from mpikfac_apps.problems import models
from mpikfac_apps.text import table
from support import inside

WAYS = {"in turn": (False, False), "overlapped": (True, False), "direct feedback": (True, True)}
"""By name, whether messages are overlapped, and whether feedback is direct."""
FORWARD = mpikfac.Estimator(fisher_type="forward-only")


def main() -> None:
    """Print the table, and write the medians.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--ends", nargs="+", default=["layer1", "layer2"], help="of blocks")
    parser.add_argument("--data", required=True, help="unpacked CIFAR-10")
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a file for the medians")
    options = parser.parse_args()
    comm = mpikfac.world()
    images = Images(comm, options)
    keys = list(product(("sgd", "kfac"), WAYS))
    made = {key: make(comm, options, images, *key) for key in keys}
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in made}
    for _ in range(options.rounds):
        for key, (trainer, step) in made.items():
            settle = partial(inside.settle, trainer) if key[0] == "kfac" else comm.Barrier
            found[key].append(timed(comm, trainer, step, settle))
    if comm.rank == 0:
        medians = {key: [1e3 * median(column) for column in zip(*found[key])] for key in keys}
        lines = [("", "", "step ms", *(f"{stage} ms" for stage in STAGES))]
        lines += [(*key, *(f"{number:.1f}" for number in medians[key])) for key in keys]
        print(f"{options.model}, {comm.size} ranks, {options.batch} images each")
        print("\n".join(table(lines)), flush=True)
        if options.output:
            numbers = {", ".join(key): dict(zip(("step", *STAGES), medians[key])) for key in keys}
            options.output.write_text(json.dumps(numbers, indent=1) + "\n")
    for trainer, _ in made.values():
        trainer.close()


def make(
    comm: Any, options: argparse.Namespace, images: Images, optimizer: str, way: str
) -> tuple[Any, Step]:
    """Return a trainer after the first step, and a step of the trainer.

    Collective over: world.
    """
    overlapped, direct = WAYS[way]
    torch.manual_seed(0)
    model = models.build(options.model, 10).to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    strategy = Strategy(CommOpt(), transport=Transport(fusion=3, overlap=overlapped))
    trainer: Any
    if optimizer == "sgd":
        trainer = mpikfac.FirstOrderTrainer(model, sgd, comm, strategy)
    else:
        settings = {
            "damping": 0.03,
            "estimator": FORWARD,
            "factor_update_steps": 1,
            "inv_update_steps": 10**9,
        }
        trainer = mpikfac.KFAC(model, sgd, comm, strategy, **settings)
    if direct:
        mpikfac.lab.DirectFeedback(trainer, options.ends)

    def step() -> None:
        x, y = images.next()
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()
        trainer.step()

    step()
    return trainer, step


if __name__ == "__main__":
    main()
