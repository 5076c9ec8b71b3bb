"""For a machine, choose a strategy, the messages to merge, and the factors to replicate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpikfac.plan import (
    NAMED,
    Form,
    HybridOpt,
    LayerShape,
    Message,
    RankPlan,
    Shape,
    Strategy,
    divisors,
    plan_for,
    stages,
)
from mpikfac.predict import costs
from mpikfac.predict.machine import Machine
from mpikfac.predict.prediction import Job
from mpikfac.predict.simulator import cheapest

Others = Sequence[tuple[str, Shape]]
Forms = Sequence[Form]
"""Descriptions of preconditioners: first the run's default, then those that layers can name."""


def choose(
    layers: Sequence[LayerShape],
    others: Others,
    ranks: int,
    machine: Machine,
    job: Job,
    forms: Forms,
) -> tuple[str, Strategy]:
    """Return the name of the strategy with the shortest mean step, and that strategy, tuned.

    Candidates are the strategies that the preconditioner supports and that give the same results as
    a single process with the joined batch, without stale bases. Every candidate is first adapted
    to the machine by `tuned`.

    Raises:
        ValueError: the preconditioner supports no strategy; the message is the reason for which the
            last candidate was rejected.
    """
    plans, refusal = {}, ValueError("there is no strategy to choose from")
    for name, strategy in _candidates(ranks):
        if job.inv_update_steps % strategy.refresh.stagger == 0:
            try:
                chosen = tuned(strategy, layers, others, ranks, machine, job, forms)
                workers = strategy.assignment.workers(ranks)
                plans[name, workers] = plan_for(layers, ranks, chosen, others, forms)
            except ValueError as error:
                refusal = error
    if not plans:
        raise refusal
    best = cheapest(plans, machine, job)
    return best[0], plans[best].strategy


def _candidates(ranks: int) -> Iterator[tuple[str, Strategy]]:
    for name, way in NAMED.items():
        if not way.same or way.strategy.refresh.staleness:
            continue
        if isinstance(hybrid := way.strategy.assignment, HybridOpt):
            for count in divisors(ranks)[1:-1]:  # between MEM-OPT (1) and COMM-OPT (all)
                of_count = replace(hybrid, grad_workers=count, grad_worker_fraction=None)
                yield name, replace(way.strategy, assignment=of_count)
        else:
            yield name, way.strategy


def tuned(
    strategy: Strategy,
    layers: Sequence[LayerShape],
    others: Others,
    ranks: int,
    machine: Machine,
    job: Job,
    forms: Forms,
) -> Strategy:
    """Return the strategy with merged messages and replicated factors that suit the machine.

    With `overlap`, layers are redistributed over overlapped messages. With `replicate_below`,
    the order below which factors are replicated is chosen again. Strategies without these options
    remain unchanged.
    """
    if ranks == 1:
        return strategy
    if layers and strategy.assignment.replicate_below:
        below = replicated_below(strategy, layers, ranks, machine, forms)
        strategy = _replicating(strategy, below)
    if not strategy.transport.overlap:
        return strategy
    plan = plan_for(layers, ranks, _fusing(strategy, 1), others, forms)
    network, rank = machine.network(job.model, job.batch), plan.of(0)
    blocks = len(rank.messages_of)
    backward = (network.backward + network.statistics * bool(layers)) / max(1, blocks)
    ready = [backward * (blocks - number) for number in range(blocks)]
    sums = [m for m in stages.reduce_statistics(rank) if m.primitive == "Allreduce"]
    if not any(stages.reduce_statistics(rank)):
        sums = [m for m in stages.reduce_gradients(rank) if _holds(m, rank)]
    if not sums or len(sums) != blocks:  # a layer's factors have several owners and messages
        return strategy
    agreement = costs.agreement_seconds(plan, machine)
    seconds = [agreement + costs.overlapped_seconds(sum_, plan, 0, machine) for sum_ in sums]
    return _fusing(strategy, merged(seconds, ready, latency=2 * agreement))


def _holds(message: Message, rank: RankPlan) -> bool:
    """Return whether a message contains gradients of layers or, without K-FAC, of parameters."""
    offsets = (rank.layouts.gradients.offsets[name] for name in rank.messages_of)
    return any(start <= offset < stop for offset in offsets for start, stop in message.spans)


def _replicating(strategy: Strategy, below: int) -> Strategy:
    assignment = replace(strategy.assignment, replicate_below=below)
    return replace(strategy, assignment=assignment)


def _fusing(strategy: Strategy, fusion: int | tuple[int, ...]) -> Strategy:
    return replace(strategy, transport=replace(strategy.transport, fusion=fusion))


def merged(seconds: Sequence[float], ready: Sequence[float], latency: float) -> tuple[int, ...]:
    """Return how many layers share each message, so that all finish as early as possible.

    Messages are listed front to back, but sent one after another, from the last layer to the first.
    A message begins once its layers are ready and the previous message has finished; each merged
    layer saves a latency. This is the problem of MG-WFBP [Shi et al. 2019]; dynamic programming
    finds its optimum.

    Args:
        seconds: for each layer, the time of a message with only this layer, including latency.
        ready: for each layer, when its values are ready, in seconds after the start of the backward
            pass.
    """
    ends = [0.0]  # for each number of layers, counted from the last one, when their messages finish
    before = [0]  # the number of layers in all of these messages but the last
    sent = [0.0, *itertools.accumulate(alone - latency for alone in reversed(seconds))]
    for count, at in enumerate(reversed(ready), start=1):
        end, others = min(
            (max(ends[others], at) + latency + sent[count] - sent[others], others)
            for others in range(count)
        )
        ends.append(end)
        before.append(others)
    groups, count = list[int](), len(seconds)
    while count:
        groups.append(count - before[count])
        count = before[count]
    return tuple(groups)


def replicated_below(
    strategy: Strategy, layers: Sequence[LayerShape], ranks: int, machine: Machine, forms: Forms
) -> int:
    """Return the order below which decomposing a factor is faster than receiving its basis.

    Source: SPD-KFAC [Shi et al. 2021].
    """
    plan = plan_for(layers, ranks, _replicating(strategy, 0), (), forms)
    factors = {
        (factor.order, factor.rank or factor.order, factor.preconditioner.name): replace(
            factor, count=1
        )
        for factor in plan.factors.values()
    }
    for (order, *_), factor in sorted(factors.items()):
        size = math.prod(factor.part(2)) * plan.itemsize
        send = costs.basis_seconds(size, plan, machine)
        if costs.factor_seconds(factor, machine) >= send:
            return order
    return max((order for order, *_ in factors), default=0) + 1
