"""Train on the least-squares problems in `rules` with each exchange, and write the weights.

mpikfac launch -n 4 on_ranks.py weights.json
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer, Strategy, files
from mpikfac.lab import LSGD
from mpikfac_apps.lab.reproduce import rules


def main() -> None:
    """Write the final weights of all ranks `[ranks, SIZE]`, by name of the exchange.

    Collective over: world.
    """
    comm = mpikfac.world()
    weights = {}
    for name, case in rules.CASES.items():
        last = trained(comm, case.strategy, rules.STEPS, case.nesterov)[-1]
        weights[name] = [of_rank.tolist() for of_rank in comm.allgather(last)]
    if comm.rank == 0:
        files.write_text(sys.argv[1], json.dumps(weights))


def trained(
    comm: mpikfac.comm.Comm, strategy: Strategy | None, steps: int, nesterov: bool = False
) -> list[rules.Weights]:
    """Return the rank's weights `[SIZE]` after each step of SGD on the ranks' losses.

    Collective over: comm.
    """
    model = nn.Linear(rules.SIZE, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=rules.RATE, momentum=rules.MOMENTUM, nesterov=nesterov
    )
    trainer = FirstOrderTrainer(model, optimizer, comm, strategy)
    matrix, target = map(torch.tensor, rules.quadratic(comm.rank))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(matrix)[:, 0] - target).square().sum() / 2
        loss.backward()
        if isinstance(trainer.plan.strategy.sync, LSGD):
            trainer.exchange.report_loss(loss)
        trainer.step()
        found.append(model.weight.detach().numpy()[0].copy())
    return found


if __name__ == "__main__":
    main()
