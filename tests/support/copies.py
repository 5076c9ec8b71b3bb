"""Least-squares problems that differ by rank, and trainers whose ranks step replicas of a model."""

from __future__ import annotations

import torch
from torch import nn

import mpikfac
from mpikfac import CommOpt, FirstOrderTrainer, MemOpt, NoGrafting, Strategy
from mpikfac.lab import DiLoCo, Parle
from mpikfac_apps.lab.reproduce.rules import MOMENTUM, RATE, SIZE, quadratic
from support import problem

PER_NODE = 2 if mpikfac.world().size == 4 else 1
DILOCO = DiLoCo(sync_every=2)
ELASTIC = Parle(
    sync_every=4,
    gamma=0.05,
    rho=0.2,
    growth=0.1,
    max_gamma=0.06,
    max_rho=0.25,
    alpha=0.6,
    outer_lr=0.9,
    outer_momentum=0.8,
)


def trained(comm, strategy, steps, nesterov=False):
    """Return the weights after each step of SGD on the ranks' losses."""
    model = nn.Linear(SIZE, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=nesterov)
    trainer = FirstOrderTrainer(model.to(problem.DEVICE), optimizer, comm, strategy)
    matrix, target = (torch.tensor(part).to(problem.DEVICE) for part in quadratic(comm.rank))
    weights = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(matrix)[:, 0] - target).square().sum() / 2
        loss.backward()
        problem.take_step(trainer, loss)
        weights.append(model.weight.detach().cpu().numpy()[0].copy())
    return weights


def kfac_of(comm, strategy, **settings):
    model = problem.network()
    chosen = {**problem.SETTINGS, "grafting": NoGrafting(), **settings}
    return problem.kfac(model, problem.sgd(model), comm, strategy, **chosen)


def trainer_of(comm, kind, sync, **more):
    """Return K-FAC or the baseline, with the given choices of a strategy."""
    if kind == "K-FAC":
        return kfac_of(comm, Strategy(CommOpt(), sync=sync, **more))
    model, strategy = problem.network(), Strategy(MemOpt(), sync=sync, **more)
    return FirstOrderTrainer(model, problem.sgd(model), comm, strategy)
