"""Simulate asynchronous clients and servers on a machine: step times, staleness, server load."""

from __future__ import annotations

import heapq
import math
import random
from typing import Any, NamedTuple

from mpikfac.plan import Plan, names
from mpikfac.predict import costs
from mpikfac.predict.machine import Machine
from mpikfac.predict.prediction import Clients, Job, Prediction, Step

UPDATES = 200  # simulated updates per client; the first tenth is discarded


class Played(NamedTuple):
    """Means over the updates of all clients in a simulation.

    Attributes:
        seconds: the time from one update of a client to the next.
        waiting: the part of this time in which a client waits until servers have processed other
            clients' updates.
        staleness: see `Clients`.
    """

    seconds: float
    waiting: float
    staleness: float


def play_clients(clients: int, computing: float, service: float, spread: float = 0.0) -> Played:
    """Simulate clients that compute, push, and wait until servers have processed earlier updates.

    Args:
        computing: the mean time that a client takes from new weights to the next push, in seconds.
        service: the time that servers take per update (push, step and fetch), in seconds.
        spread: the standard deviation of the logarithm of the computing time.
    """
    draws = random.Random(0)

    def computed() -> float:
        return computing * draws.lognormvariate(-(spread**2) / 2, spread)

    arrivals = [(computed(), client) for client in range(clients)]
    heapq.heapify(arrivals)
    fetched, version = [0] * clients, 0
    free = began = waiting = stale = 0.0
    first, total = UPDATES // 10 * clients, UPDATES * clients
    while version < total:
        now, client = heapq.heappop(arrivals)
        if version == first:
            began, waiting, stale = free, 0.0, 0.0
        waiting += max(0.0, free - now)
        stale += version - fetched[client]
        free = max(now, free) + service
        version += 1
        fetched[client] = version
        heapq.heappush(arrivals, (free + computed(), client))
    counted = total - first
    return Played((free - began) * clients / counted, waiting / counted, stale / counted)


def of_clients(plan: Plan, machine: Machine, job: Job) -> Prediction:
    """Predict the steps of asynchronous clients.

    All ranks of the plan train, and servers are additional ranks.

    Servers own equal shards of the weights and process updates one after another. Pushes and
    fetches share the link of a server. A warm-up is not simulated.

    Raises:
        ValueError: the machine has no times for the model, or the plan has K-FAC layers, which
            servers do not support.
    """
    asynchrony: Any = plan.strategy.sync
    if plan.covered:
        raise ValueError(
            "clients and servers support only training without K-FAC; use a strategy such as "
            "sgd:downpour"
        )
    number, steps = plan.ranks // asynchrony.ranks_per_client, asynchrony.push_interval
    network = machine.network(job.model, job.batch)
    size = plan.of(0).layouts.gradients.size * plan.itemsize
    ranks, nodes, sharing = costs.placed(range(asynchrony.ranks_per_client), plan, machine)
    stages = {
        names.FORWARD: network.forward,
        names.BACKWARD: network.backward,
        names.GRADIENTS: network.gradients,
        names.REDUCE_GRADIENTS: costs.collective_seconds(
            "Allreduce", size, ranks, machine, nodes, sharing
        ),
    }
    between = 1 if machine.between is None else 2  # nodes; a server is on its own node
    hop = costs.collective_seconds("Recv", size / asynchrony.servers, 2, machine, between)
    fetches = steps / asynchrony.fetches  # per update
    service = (1 + fetches) * hop + network.optimizer / asynchrony.servers
    computing = steps * sum(stages.values())
    played = play_clients(number, computing, service, job.stragglers / math.sqrt(steps))
    seconds = played.seconds / steps
    step = Step(
        seconds,
        exposed=seconds - sum(stages.values()) + stages[names.REDUCE_GRADIENTS],
        waiting=played.waiting / steps,
        overlapped=0.0,
        sent=size / steps,
        stages=stages | {names.EXCHANGE_UPDATES: service / steps},
    )
    updates = number / played.seconds
    return Prediction(
        *(step, step, step, step),
        memory=max(sum(plan.memory(rank).values()) for rank in (0, plan.ranks - 1)),
        clients=Clients(number, updates, played.staleness, updates * service),
    )
