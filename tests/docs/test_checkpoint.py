"""The page about checkpoints names the items of checkpoints."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import mpikfac
from mpikfac import AdamGrafting, AdamInEigenbases, Strategy
from mpikfac.lab import DiLoCo, Parle
from support import inside, problem

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "checkpoint.md"


def items_of(own=0.9, **settings):
    """Return the names in a trainer's state after a step; `own` is the optimizer's momentum."""
    model = nn.Sequential(OrderedDict(conv1=nn.Conv2d(1, 2, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=own)
    kfac = problem.kfac(model, optimizer, mpikfac.world(), **settings)
    model(torch.ones(2, 1, 4, 4)).square().mean().backward()
    kfac.step()
    kfac.average_replicas()
    return kfac.state_dict()


def test_items_that_the_page_names_exist():
    """Oracle: the states of eight trainers; copies as rank 2 and 0 of three ranks save them."""
    items = re.search(r"\*\*Items\*\*.*?\n\n(?!-)", PAGE.read_text(), re.DOTALL)
    names = re.findall(r"`([a-z]+/[^`]+)`", items[0])
    assert len(names) >= 5
    known = [
        items_of(damping=mpikfac.LevenbergMarquardt()),
        items_of(preconditioner="ekfac", grafting=AdamGrafting(orthogonalize=False)),
        items_of(own=0, grafting=AdamGrafting(momentum=0.9)),
        items_of(preconditioner="shampoo"),
        items_of(
            own=0,
            preconditioner="soap",
            grafting=AdamInEigenbases(),
            relative_damping=True,
            damping=0.001,
        ),
        items_of(own=0, grafting=AdamGrafting(normalize_rows=True)),
    ]
    exchanges = DiLoCo(sync_every=2, outer_lr=1.0), Parle(sync_every=2, outer_momentum=0.9)
    for sync, rank in zip(exchanges, (2, 0)):
        copies = items_of(strategy=Strategy(sync=sync))
        known.append(inside.of_copies(copies, rank))
    assert set(names) <= set().union(*known)
