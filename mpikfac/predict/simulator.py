"""Simulate the steps of a plan on a machine: their total time, and the time of communication.

Ranks wait for each other in collectives, so a stage takes as long as it does on the slowest rank.
Only a few representative ranks are simulated, so a plan for thousands of ranks takes only seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from mpikfac.plan import Message, Plan, memory_of_grafting, names
from mpikfac.predict import costs
from mpikfac.predict.clients import of_clients
from mpikfac.predict.machine import Machine
from mpikfac.predict.prediction import Job, Prediction, Step

# The stages before and in `KFAC.step`, in order.
STAGES = (
    *(names.FORWARD, names.BACKWARD, names.STATISTICS, names.REDUCE_SCALES),
    *(names.REDUCE_STATISTICS, names.DECOMPOSE, names.SEND_FACTORS, names.RECEIVE_BASES),
    *(names.PUBLISH_BASES, names.GRADIENTS, names.REDUCE_GRADIENTS, names.GATHER_GRADIENTS),
    *(names.MOMENTS, names.PRECONDITION, names.PUBLISH_DIRECTIONS, names.CLIP),
    *(names.SCATTER_DIRECTIONS, names.OPTIMIZER, names.PUBLISH_WEIGHTS, *names.EXCHANGES),
)
BACKWARD = (names.BACKWARD, names.STATISTICS)
OVERLAPPED = ("urgent", "overlapped")  # kinds of events
Name = TypeVar("Name", bound=Hashable)


class Event(NamedTuple):
    """Describe a part of a step on a rank.

    Attributes:
        kind: "compute"; "message", during which the rank does not compute; "urgent" or
            "overlapped", a message sent during the following computations, urgent messages first;
            "wait" for the urgent messages, or "wait for all" messages.
        ready: the fraction of the backward pass after which an overlapped message is sent.
        slowdown: the time by which an overlapped message slows the computation, in seconds.
        agreement: the time that ranks need to agree to send an overlapped message, in seconds; it
            is hidden if another message is in flight.
    """

    stage: str
    seconds: float
    kind: Literal["compute", "message", "urgent", "overlapped", "wait", "wait for all"] = "compute"
    ready: float = 1.0
    slowdown: float = 0.0
    agreement: float = 0.0


def simulate(plan: Plan, machine: Machine, job: Job) -> Prediction:
    """Predict the steps of `plan` on a machine.

    With replicas of the model, every kind of step is a mean over steps with and without an
    exchange of weights. With clients and servers, the steps of a client are predicted.

    Raises:
        ValueError: the machine has no times for the model or for the preconditioner, or a field of
            the job is out of range.
    """
    _check(job)
    if not plan.strategy.sync.waits_for_all:
        return of_clients(plan, machine, job)
    ranks = representatives(plan)
    stagger = plan.strategy.refresh.stagger
    if job.inv_update_steps % stagger:
        raise ValueError(
            f"inv_update_steps={job.inv_update_steps} must be a multiple of stagger={stagger}"
        )
    parts = shares(job, stagger)
    kinds = {
        kind: _of_turns(plan, machine, job, ranks, kind)
        for kind, part in parts.items()
        if part > 0 or kind != (False, True)  # the other kinds are always reported
    }
    return Prediction(
        mean=_mean([(step, parts[kind]) for kind, step in kinds.items()]),
        ordinary=kinds[False, False],
        factors=kinds[True, False],
        refresh=kinds[True, True],
        memory=max(sum(memory(plan, rank, job).values()) for rank in ranks),
    )


def cheapest(
    plans: Mapping[Name, Plan], machine: Machine, job: Job, memory: int | None = None
) -> Name:
    """Return the name of the fastest plan that fits in `memory` bytes per rank, by its mean step.

    Raises:
        ValueError: no plan fits into `memory`; see also `simulate`.
    """
    predictions = {name: simulate(plan, machine, job) for name, plan in plans.items()}
    fitting = [name for name in predictions if memory is None or predictions[name].memory <= memory]
    if not fitting:
        least = min(prediction.memory for prediction in predictions.values())
        raise ValueError(f"memory={memory} bytes is too little for any plan; use at least {least}")
    return min(fitting, key=lambda name: predictions[name].mean.seconds)


def memory(plan: Plan, rank: int, job: Job) -> dict[str, int]:
    """Return the bytes of every arena on `rank`, including those of grafting, by kind."""
    return plan.memory(rank) | memory_of_grafting(plan.of(rank), job.grafting)


def representatives(plan: Plan) -> list[int]:
    """Return a few ranks that determine a step's time, and the last rank, which might own nothing.

    They are the ranks with the longest decompositions, the most elements in their own factors, the
    most elements in the factors of their column, and the most work to precondition. In a sharded
    model, they include rank 0, which holds the most rows.
    """
    owners = sorted(set(plan.owners.values())) or [0]
    squares = {rank: sum(f.work(2) for f in plan.of(rank).owned) for rank in owners}
    columns: dict[int, int] = {}
    for rank, square in squares.items():
        column = plan.grid.position(rank)[1]
        columns[column] = columns.get(column, 0) + square

    def products(rank: int) -> int:
        shapes = [layer.shape for layer in plan.of(rank).preconditioned]
        return sum(sum(shape.products()) + sum(shape.orthogonalising()) for shape in shapes)

    return sorted(
        {
            max(owners, key=plan.load),
            max(owners, key=squares.__getitem__),
            max(owners, key=lambda rank: columns.get(plan.grid.position(rank)[1], 0)),
            max(owners, key=products),
            plan.ranks - 1,
            *([0] if plan.sharding else []),
        }
    )


def shares(job: Job, stagger: int = 1) -> dict[tuple[bool, bool], float]:
    """Return the fraction of steps of each kind.

    The keys are pairs: whether a step computes new factors, and whether it computes new bases.
    """
    between = job.inv_update_steps // stagger
    factors, bases = 1 / job.factor_update_steps, 1 / between
    both = 1 / math.lcm(job.factor_update_steps, between)
    return {
        (False, False): 1 - factors - bases + both,
        (True, False): factors - both,
        (False, True): bases - both,
        (True, True): both,
    }


def play(events: Sequence[Event], slack: float = 0.0) -> tuple[float, float]:
    """Return the time of all events, and the time in which the rank does not compute, in seconds.

    Messages are sent one after another. Overlapped messages can continue for `slack` seconds after
    the last event, during the next step.
    """
    now = computed = 0.0
    urgent = line = 0.0  # end of the urgent messages, and of all messages
    for event in events:
        if event.kind == "compute":
            now += event.seconds
            computed += event.seconds
        elif event.kind == "wait":
            now = max(now, urgent)
        elif event.kind == "wait for all":
            now = max(now, line)
        else:
            seconds = event.seconds + (event.agreement if line <= now else 0.0)
            line = max(now, line) + seconds
            if event.kind != "overlapped":
                urgent = max(now, urgent) + seconds
            if event.kind == "message":
                now = urgent
            now += event.slowdown
    end = max(now, urgent, line - slack)
    return end, end - computed


def sequence(
    compute: Mapping[str, float], messages: Sequence[Event], overlap: bool = False
) -> list[Event]:
    """Return computations and messages in the order of a step.

    With `overlap`, the backward pass is divided into slices; after each slice, some messages are
    ready.
    """
    events: list[Event] = []
    sent = [message for message in messages if message.kind in OVERLAPPED]
    if overlap and sent:
        events.append(Event(names.FORWARD, compute.get(names.FORWARD, 0.0)))
        events += _backward(compute, sent)
        compute = {s: t for s, t in compute.items() if s not in (*BACKWARD, names.FORWARD)}
        messages = [message for message in messages if message not in sent]
    left = [Event(stage, compute[stage]) for stage in STAGES if compute.get(stage)]
    for message in messages:
        while left and STAGES.index(left[0].stage) < STAGES.index(message.stage):
            events.append(left.pop(0))
        events.append(message)
    return events + left


def _backward(compute: Mapping[str, float], messages: Sequence[Event]) -> Iterator[Event]:
    """Yield the backward pass in slices, each followed by the messages that are ready by then."""
    done = 0.0
    for ready in sorted({1.0, *(message.ready for message in messages)}):
        for stage in BACKWARD:
            yield Event(stage, compute.get(stage, 0.0) * (ready - done))
        done = ready
        yield from (message for message in messages if message.ready == ready)


def _of_turns(
    plan: Plan, machine: Machine, job: Job, ranks: Sequence[int], kind: tuple[bool, bool]
) -> Step:
    """Return the mean step over a refresh's slots, and over steps with and without exchanges."""
    all_layers, *turns = plan.of(0).turns
    turns = turns if kind[1] and turns else [all_layers]
    share = plan.strategy.sync.share_of_steps
    everywhere, in_node = map(share, names.EXCHANGES)
    left_out = {
        (): everywhere,
        (names.EXCHANGE_WEIGHTS,): in_node - everywhere,
        names.EXCHANGES: 1 - in_node,
    }
    steps = [
        (_step(plan, machine, job, ranks, kind, turn, without), part / len(turns))
        for turn in turns
        for without, part in left_out.items()
        if part > 0
    ]
    return _mean(steps)


def _together(plan: Plan, job: Job) -> int:
    """Return the number of steps from one message between all ranks to the next."""
    interval = plan.strategy.sync.sync_every
    return min(interval, job.factor_update_steps) if plan.layers else interval


def _step(
    plan: Plan,
    machine: Machine,
    job: Job,
    ranks: Sequence[int],
    kind: tuple[bool, bool],
    turn: int | None,
    without: Collection[str],
) -> Step:
    statistics, refresh = kind
    seen = {
        rank: [
            message
            for message in plan.messages(rank, *kind, True, turn)
            if message.stage not in without
        ]
        for rank in ranks
    }
    timed = [_timed(messages, plan, rank, machine) for rank, messages in seen.items()]
    messages = max(timed, key=lambda events: sum(event.seconds for event in events))
    parts = [_computations(plan, rank, machine, job, kind, turn) for rank in ranks]
    spread = job.stragglers / math.sqrt(_together(plan, job))  # of the mean of several steps
    slowest = costs.expected_slowest(spread, plan.ranks)
    compute = {stage: slowest * max(part[stage] for part in parts) for stage in parts[0]}
    if refresh and plan.strategy.refresh.servers:
        step = sum(seconds for stage, seconds in compute.items() if stage != names.DECOMPOSE)
        compute[names.DECOMPOSE] = _awaited(plan, machine, turn, step)
    overlap = plan.strategy.transport.overlap
    if overlap:
        messages.append(Event(names.REDUCE_GRADIENTS, 0.0, "wait"))
        if refresh and (statistics or plan.of(0).of_gradient):
            messages.append(Event(names.DECOMPOSE, 0.0, "wait for all"))
        messages.sort(key=lambda event: STAGES.index(event.stage))
    events = sequence(compute, messages, overlap)
    seconds, exposed = play(events, compute[names.FORWARD] if overlap and not refresh else 0.0)
    stages: dict[str, float] = {}
    for event in events:
        stages[event.stage] = stages.get(event.stage, 0.0) + event.seconds
    return Step(
        seconds,
        exposed,
        waiting=sum(compute.values()) * (1 - 1 / slowest),
        overlapped=sum(event.seconds for event in events if event.kind in OVERLAPPED),
        sent=max(sum(message.wire for message in sent) for sent in seen.values()),
        stages=stages,
    )


def _timed(messages: Sequence[Message], plan: Plan, rank: int, machine: Machine) -> list[Event]:
    kinds: dict[str, Any] = {}
    if plan.strategy.transport.overlap:
        kinds = {names.REDUCE_GRADIENTS: "urgent"}
        kinds |= {} if plan.of(rank).late else {names.REDUCE_STATISTICS: "overlapped"}
    agreement = costs.agreement_seconds(plan, machine)
    events = []
    for message in messages:
        if kind := kinds.get(message.stage):
            seconds = costs.overlapped_seconds(message, plan, rank, machine)
            lost, ready = (1 - machine.hidden) * seconds, _ready(message, plan, rank)
            events.append(Event(message.stage, seconds, kind, ready, lost, agreement))
        else:
            seconds = costs.message_seconds(message, plan, rank, machine)
            events.append(Event(message.stage, seconds, "message"))
    return events


def _ready(message: Message, plan: Plan, rank: int) -> float:
    """Return the fraction of the backward pass before a message, if layers take equal times."""
    gradients = message.stage == names.REDUCE_GRADIENTS
    layouts = plan.of(rank).layouts
    layout = layouts.gradients if gradients else layouts.statistics
    blocks = [
        [layer.name] if gradients else [factor.name for factor in layer.factors]
        for layer in plan.covered
    ] or [[name] for name in plan.of(rank).messages_of]  # without K-FAC, parameters
    numbers = {name: number for number, of_layer in enumerate(blocks) for name in of_layer}
    sent = (
        numbers[name]
        for name, offset in layout.offsets.items()
        if name in numbers and any(start <= offset < stop for start, stop in message.spans)
    )
    return 1 - min(sent, default=0) / len(blocks)


def _awaited(plan: Plan, machine: Machine, turn: int | None, step: float) -> float:
    """Return the seconds that ranks wait for the bases that curvature servers must deliver."""
    loads = [0.0] * plan.strategy.refresh.servers
    for rank in sorted(set(plan.owners.values())):
        seconds = costs.decompose_seconds(plan, rank, machine, turn)
        loads[plan.grid.curvature_server(rank)] += seconds
    return max(0.0, max(loads) - plan.strategy.refresh.staleness * step)


def _computations(
    plan: Plan,
    rank: int,
    machine: Machine,
    job: Job,
    kind: tuple[bool, bool],
    turn: int | None,
) -> dict[str, float]:
    """Return the time of every stage in which `rank` computes, in seconds."""
    network = machine.network(job.model, job.batch)
    seconds = {
        names.FORWARD: network.forward,
        names.BACKWARD: network.backward,
        names.GRADIENTS: network.gradients,
        names.OPTIMIZER: network.optimizer * costs.stepped_share(plan, rank),
    }
    if plan.layers:
        seconds[names.PRECONDITION] = costs.precondition_seconds(
            plan, rank, machine, network, job.grafting.orthogonalize
        )
        statistics, refresh = kind
        if statistics:
            seconds[names.STATISTICS] = costs.statistics_seconds(plan, rank, machine, network)
            seconds[names.MOMENTS] = costs.moment_seconds(plan, rank, machine)
        if refresh:
            seconds[names.DECOMPOSE] = costs.decompose_seconds(plan, rank, machine, turn)
    return seconds


def _mean(kinds: Sequence[tuple[Step, float]]) -> Step:
    def mean(value: Callable[[Step], float]) -> float:
        return sum(share * value(step) for step, share in kinds)

    stages: dict[str, float] = {}
    for step, share in kinds:
        for name, seconds in step.stages.items():
            stages[name] = stages.get(name, 0.0) + share * seconds
    return Step(
        mean(lambda step: step.seconds),
        mean(lambda step: step.exposed),
        mean(lambda step: step.waiting),
        mean(lambda step: step.overlapped),
        mean(lambda step: step.sent),
        stages,
    )


def _check(job: Job) -> None:
    for name in ("batch", "factor_update_steps", "inv_update_steps"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name}={getattr(job, name)} must be a whole number >= 1")
    if not 0 <= job.stragglers <= 1:
        raise ValueError(f"stragglers={job.stragglers} must be between 0 and 1")
