"""What a measured machine decides: which messages to merge, what to decompose everywhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpikfac.plan import NAMED, LayerShape, Shape, Solver, Strategy, divisors, make_plan
from mpikfac.predict import costs
from mpikfac.predict.machine import Machine
from mpikfac.predict.simulator import Job, cheapest

Others = Sequence[tuple[str, Shape]]


def choose(
    layers: Sequence[LayerShape],
    others: Others,
    ranks: int,
    machine: Machine,
    job: Job,
    solver: Solver,
) -> tuple[str, Strategy]:
    """The name of the strategy with the shortest mean step, and its value for that machine.

    Of those that the solver can do and that train as one process with the joined batch does,
    without stale bases; each is `tuned` first.

    Raises:
        ValueError: the solver can do none; why not the last one.
    """
    plans, refusal = {}, ValueError("there is no strategy to choose from")
    for name, strategy in _candidates(ranks):
        if job.basis_every % strategy.refresh.stagger == 0:
            try:
                chosen = tuned(strategy, layers, others, ranks, machine, job, solver)
                plans[name, strategy.workers] = make_plan(layers, ranks, chosen, others, solver)
            except ValueError as error:
                refusal = error
    if not plans:
        raise refusal
    best = cheapest(plans, machine, job)
    return best[0], plans[best].strategy


def _candidates(ranks: int) -> Iterator[tuple[str, Strategy]]:
    for name, way in NAMED.items():
        if way.same and not way.choices.get("delay"):
            every = [{}] if "workers" in way.choices else _between(ranks)
            yield from ((name, way.make(ranks, **workers)) for workers in every)


def _between(ranks: int) -> list[dict[str, int]]:
    """The numbers of workers that are neither COMM-OPT nor MEM-OPT."""
    return [{"workers": count} for count in divisors(ranks)[1:-1]]


def tuned(
    strategy: Strategy,
    layers: Sequence[LayerShape],
    others: Others,
    ranks: int,
    machine: Machine,
    job: Job,
    solver: Solver,
) -> Strategy:
    """The strategy with the messages and the replicated factors that suit the machine.

    Only what it has of both: messages beside the backward pass are merged anew, and small factors
    replicated up to another order.
    """
    if not layers or ranks == 1:
        return strategy
    if strategy.replicate_below:
        below = replicated_below(strategy, layers, ranks, machine, solver)
        strategy = strategy.changed(replicate_below=below)
    if not strategy.transport.overlap:
        return strategy
    plan = make_plan(layers, ranks, strategy.changed(fusion=1), others, solver)
    network = machine.network(job.model, job.batch)
    backward = (network.backward + network.statistics) / len(layers)
    ready = [backward * (len(layers) - number) for number in range(len(layers))]
    sums = [m for m in plan.reduce_statistics(0) if m.primitive == "Allreduce"]
    if len(sums) != len(layers):  # several messages for a layer's factors: they have several owners
        return strategy
    seconds = [costs.message_seconds(message, plan, 0, machine) for message in sums]
    latency = costs.message_latency(plan, 0, machine)
    return strategy.changed(fusion=merged(seconds, ready, latency))


def merged(seconds: Sequence[float], ready: Sequence[float], latency: float) -> tuple[int, ...]:
    """Layers of each message, front to back, so that messages and a backward pass end early.

    From the last layer to the first: a message takes the layer before along if that is ready
    before the message could start, or if waiting for it costs less than a message's latency
    [MG-WFBP, Shi et al. 2019].

    Args:
        seconds: of a message of each layer alone, latency included.
        ready: when each layer's values are there, in seconds from the start of the backward pass.
    """
    groups = [1]
    start, length = ready[-1], seconds[-1]  # of the message that is open
    line = 0.0  # when the messages before it are through
    for own, there in zip(reversed(seconds[:-1]), reversed(ready[:-1])):
        start = max(line, start)
        if there <= start or there - start < latency:
            groups[0] += 1
            start, length = max(start, there), length + own - latency
        else:
            line = start + length
            groups.insert(0, 1)
            start, length = there, own
    return tuple(groups)


def replicated_below(
    strategy: Strategy, layers: Sequence[LayerShape], ranks: int, machine: Machine, solver: Solver
) -> int:
    """The order up to which decomposing a factor takes less time than to receive its basis.

    [SPD-KFAC, Shi et al. 2021]
    """
    plan = make_plan(layers, ranks, strategy.changed(replicate_below=0), (), solver)
    solvers = plan.solvers(plan.factors)
    factors = {
        (factor.order, factor.rank or factor.order, solvers[name]): replace(factor, count=1)
        for name, factor in plan.factors.items()
    }
    for (order, *_), factor in sorted(factors.items()):
        size = math.prod(factor.part(2)) * plan.itemsize
        send = costs.basis_seconds(size, plan, machine)
        if costs.factor_seconds(factor, plan, machine) >= send:
            return order
    return max(order for order, *_ in factors) + 1
