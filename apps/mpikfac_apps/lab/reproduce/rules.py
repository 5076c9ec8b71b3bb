"""Published exchange rules in numpy, on least-squares problems that differ between ranks.

Each rule is implemented from its paper, for all ranks at once, without code from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpikfac import MemOpt, Strategy, Transport
from mpikfac.lab import DASO, LSGD, DiLoCo, LocalSGD, Parle
from mpikfac.plan import Synchronization

Weights: TypeAlias = NDArray[np.float64]
"""Weights of all ranks `[ranks, SIZE]`."""

RATE, MOMENTUM, SIZE = 0.05, 0.9, 6
STEPS = 12


def quadratic(rank: int) -> tuple[Weights, Weights]:
    """Return the matrix `[8, SIZE]` and target `[8]` of a rank's loss `|A w - b|^2 / 2`."""
    random = np.random.default_rng(rank)
    return random.normal(size=(8, SIZE)), random.normal(size=8)


def gradients(weights: Weights) -> Weights:
    """Return the gradient of each rank at its own weights `[ranks, SIZE]`."""
    losses = map(quadratic, range(len(weights)))
    return np.array([a.T @ (a @ own - b) for own, (a, b) in zip(weights, losses)])


def within(nodes: int, numbers: Weights) -> Weights:
    """Return, for each rank, the mean of `numbers` over the ranks of its node."""
    means = numbers.reshape(nodes, -1, SIZE).mean(1, keepdims=True)
    return np.broadcast_to(means, (nodes, len(numbers) // nodes, SIZE)).reshape(numbers.shape)


def infrequent(
    ranks: int,
    steps: int,
    every: int,
    begin: int = 0,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    nodes: int | None = None,
) -> list[Weights]:
    """Return the weights of all ranks after each step of local SGD or DiLoCo.

    They follow the rules of [Lin et al. 2020] and [Douillard et al. 2023].
    """
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    before, outer, found = w[0].copy(), np.zeros(SIZE), []
    for step in range(steps):
        g = within(nodes or ranks, gradients(w))
        if step < begin or every == 1:
            g = within(1, g)
        v = MOMENTUM * v + g
        w = w - RATE * v
        if step < begin:
            before = w[0].copy()
        elif every > 1 and (step + 1 - begin) % every == 0:
            change = before - w.mean(0)
            outer = outer_momentum * outer + change
            before = before - outer_lr * (change + outer_momentum * outer)
            w[:] = before
        found.append(w.copy())
    return found


def daso(ranks: int, steps: int, nodes: int, every: int = 4, late: int = 2) -> list[Weights]:
    """Return the weights of all ranks after each step of DASO [Coquelin et al. 2022]."""
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    sent: dict[int, Weights] = {}
    found = []
    for step in range(steps):
        v = MOMENTUM * v + within(nodes, gradients(w))
        w = w - RATE * v
        if (step + 1) % every == 0:
            sent[step + late] = nodes * w.mean(0)
        if step in sent:
            w = (2 * late * w + sent[step]) / (2 * late + nodes)
        found.append(w.copy())
    return found


def lsgd(
    ranks: int,
    steps: int,
    rule: LSGD,
    per_node: int = 1,
    every: int | None = None,
    begin: int = 0,
    copies: int | None = None,
    node_every: int | None = None,
) -> list[Weights]:
    """Return the weights of all ranks after each step of LSGD [Teng et al. 2019].

    With `copies`, neighbouring ranks train a copy of the model together, and the copy with the
    smallest sum of losses leads. Losses are summed over the steps since leaders were last chosen.
    """
    every = every or rule.sync_every
    losses = [quadratic(rank) for rank in range(ranks)]
    nodes = [range(ranks)] + [range(n, n + per_node) for n in range(0, ranks, per_node)]
    nodes = nodes if 1 < per_node < ranks else nodes[:1]
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    leaders, heard, found = [w[0].copy() for _ in nodes], np.zeros(ranks), []
    for step in range(steps):
        of_ranks = np.array([((a @ own - b) ** 2).sum() / 2 for own, (a, b) in zip(w, losses)])
        heard += of_ranks.reshape(copies or ranks, -1).sum(1).repeat(ranks // (copies or ranks))
        g = within(1 if step < begin else copies or ranks, gradients(w))
        v = MOMENTUM * v + g
        w = w - RATE * v
        if step < begin:
            leaders, heard = [w[0].copy() for _ in nodes], np.zeros(ranks)
            found.append(w.copy())
            continue
        periods = [every] + [node_every or every] * (len(nodes) - 1)
        due = [(step + 1 - begin) % period == 0 for period in periods]
        for place, node in enumerate(nodes):
            if due[place]:
                leaders[place] = w[min(node, key=heard.__getitem__)].copy()
        heard, old = np.zeros(ranks) if any(due) else heard, w.copy()
        for node, leader, now, period in zip(nodes, leaders, due, periods):
            share = rule.leader_step if now else rule.leader_pull / period
            w[node] += share * (leader - old[node])
        found.append(w.copy())
    return found


def parle(
    ranks: int, steps: int, rule: Parle, begin: int = 0, copies: int | None = None
) -> list[Weights]:
    """Return the weights of all ranks after each step of Parle [Chaudhari et al. 2018].

    With each exchange, the pulls `gamma` and `rho` are multiplied by `1 + growth`, up to maxima,
    which are 1 and 10 in the authors' program; `rho` grows before the exchange that uses it. With
    `copies`, neighbouring ranks train a copy of the model together.
    """
    every = rule.sync_every
    y, v, found = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE)), []
    x, z, outer = y.copy(), y.copy(), np.zeros((ranks, SIZE))

    def grown(pull: float, most: float, exchanges: int) -> float:
        return min(pull * (1 + rule.growth) ** exchanges, most)

    for step in range(steps):
        exchanges = max(0, step - begin) // every
        g = gradients(y)
        if step < begin:
            g = within(1, g)
        else:
            gamma = grown(rule.gamma, rule.max_gamma, exchanges)
            g = within(copies or ranks, g) + gamma * (y - x)
        v = MOMENTUM * v + g
        y = y - RATE * (g + MOMENTUM * v)
        z = rule.alpha * z + (1 - rule.alpha) * y
        if step < begin:
            x, z = y.copy(), y.copy()
        elif (step + 1 - begin) % every == 0:
            rho = grown(rule.rho, rule.max_rho, exchanges + 1)
            d = (x - z) + rho * (x - z.mean(0))
            outer = rule.outer_momentum * outer + d
            x = x - rule.outer_lr * (d + rule.outer_momentum * outer)
            y, z = x.copy(), x.copy()
        found.append(y.copy())
    return found


def streaming_diloco(
    ranks: int,
    steps: int,
    every: int = 4,
    late: int = 3,
    share: float = 0.3,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    begin: int = 0,
) -> list[Weights]:
    """Return all ranks' weights after each step of Streaming DiLoCo [Douillard et al. 2025].

    There are two fragments: one contains all weights, and the other only the ranks' votes.
    """
    w, v = np.ones((ranks, SIZE)), np.zeros((ranks, SIZE))
    before, outer, found = w[0].copy(), np.zeros(SIZE), []
    sent: dict[int, Weights] = {}
    for step in range(steps):
        g = gradients(w)
        if step < begin:
            g[:] = g.mean(0)
        v = MOMENTUM * v + g
        w = w - RATE * v
        if step < begin:
            before = w[0].copy()
        elif (step + 1 - begin) % every == every // 2:
            sent[step + late] = before - w.mean(0)
        if step in sent:
            outer = outer_momentum * outer + sent[step]
            before = before - outer_lr * (sent[step] + outer_momentum * outer)
            w = share * w + (1 - share) * before
        found.append(w.copy())
    return found


def projection(weights: ArrayLike) -> float:
    """Return the projection of weights `[ranks, SIZE]` on a fixed random vector.

    Unlike a norm, it changes if a sign flips, or if ranks are swapped.
    """
    rows = np.asarray(weights)
    return float((np.random.default_rng(0).normal(size=rows.shape) * rows).sum())


@dataclass(frozen=True)
class Case:
    """An exchange of weights, and the weights that its published rule gives.

    Attributes:
        expected: returns the weights of all ranks after each of STEPS steps, given the number of
            ranks.
        nesterov: whether SGD uses Nesterov momentum.
        ranks_per_node: the ranks per node, for an exchange that uses nodes.
    """

    sync: Synchronization
    expected: Callable[[int], list[Weights]]
    nesterov: bool = False
    ranks_per_node: int | None = None

    @property
    def strategy(self) -> Strategy:
        """The library's strategy that trains with this exchange."""
        transport = Transport(ranks_per_node=self.ranks_per_node)
        return Strategy(MemOpt(), sync=self.sync, transport=transport)


LOCAL_SGD = LocalSGD(sync_every=3)
DILOCO = DiLoCo(sync_every=3)
STREAM = DiLoCo(sync_every=4, fragments=2, delay=3, mixing=0.3)
PARLE = Parle(sync_every=4, growth=0.5, outer_lr=0.1, outer_momentum=0.9)
"""Both pulls start at the authors' values, and reach their maxima within 60 steps."""
LEADER = LSGD(sync_every=3, leader_step=0.2, leader_pull=0.3)
LATE = DASO(sync_every=4, delay=2)
CASES = {
    "local SGD": Case(LOCAL_SGD, lambda ranks: infrequent(ranks, STEPS, LOCAL_SGD.sync_every)),
    "DiLoCo": Case(
        DILOCO,
        lambda ranks: infrequent(
            *(ranks, STEPS, DILOCO.sync_every),
            outer_lr=DILOCO.outer_lr,
            outer_momentum=DILOCO.outer_momentum,
        ),
    ),
    "Streaming DiLoCo": Case(STREAM, lambda ranks: streaming_diloco(ranks, STEPS)),
    "Parle": Case(PARLE, lambda ranks: parle(ranks, STEPS, PARLE), nesterov=True),
    "LSGD": Case(LEADER, lambda ranks: lsgd(ranks, STEPS, LEADER)),
    "DASO": Case(
        LATE,
        lambda ranks: daso(ranks, STEPS, ranks, LATE.sync_every, LATE.delay),
        ranks_per_node=1,
    ),
}
