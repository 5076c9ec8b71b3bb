"""Choose data or model parallelism for each layer, by bytes sent or by time on a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mpikfac.plan import (
    CHANNELS,
    Channels,
    LayerCall,
    MemOpt,
    Message,
    Place,
    Plan,
    Split,
    Strategy,
    TensorParallelPlan,
    divisors,
    layer_messages,
    names,
    places,
    plan_for,
)
from mpikfac.predict.costs import message_seconds
from mpikfac.predict.machine import Machine

Cost = Callable[[Sequence[Message]], float]
Ways = Mapping[Place, tuple[float, dict[str, Channels]]]
"""Map the role of a row's last layer to the row's lowest cost so far and its split layers."""


def choose_tensor_parallel_plan(
    calls: Sequence[LayerCall],
    ranks: int,
    machine: Machine | None = None,
    itemsize: int = 4,
    strided: bool = False,
) -> TensorParallelPlan:
    """Return the plan whose messages in a first-order step are cheapest.

    All divisors of the number of ranks are tried as `tp_size`. The cost is the bytes that a rank
    sends in rings or, if `machine` is given, the time of all messages on it. Computations are
    assumed to take the same time in all plans, and no message is overlapped.

    Args:
        calls: the layers in the order of the forward pass; see `layer_calls`.
        itemsize: bytes per element.
        strided: see `TensorParallelPlan`.
    """
    best, least = TensorParallelPlan(strided=strided), math.inf
    for tp_size in divisors(ranks):
        cost = _cost(TensorParallelPlan(tp_size, strided=strided), ranks, machine, itemsize)
        total, axes = 0.0, dict[str, Channels]()
        for row in _rows(calls):
            of_row, chosen = _cheapest(row, tp_size, ranks, itemsize, cost)
            total, axes = total + of_row, axes | chosen
        if total < least:
            least, best = total, TensorParallelPlan(tp_size if axes else 1, axes, strided)
    return best


def tensor_parallel_seconds(
    calls: Sequence[LayerCall],
    tp_plan: TensorParallelPlan,
    ranks: int,
    machine: Machine,
    itemsize: int = 4,
) -> float:
    """Return the time of all messages of the layers in a first-order step on a machine.

    Gradients of all layers share messages, so the latency of messages with gradients is left out.
    """
    cost, tp_size = _cost(tp_plan, ranks, machine, itemsize), tp_plan.tp_size
    at = places(calls, tp_plan.layers)
    return sum(cost(layer_messages(c, at[c.name], tp_size, ranks, itemsize)) for c in calls)


def _cost(tp_plan: TensorParallelPlan, ranks: int, machine: Machine | None, itemsize: int) -> Cost:
    """Return a function that computes the cost of messages: seconds on `machine`, or bytes."""
    if machine is None:
        return lambda messages: sum(message.wire for message in messages)
    split = Split(TensorParallelPlan(tp_plan.tp_size, strided=tp_plan.strided))
    plan = plan_for([], ranks, Strategy(MemOpt()), itemsize=itemsize, split=split)
    return lambda messages: sum(_seconds(message, plan, machine) for message in messages)


def _seconds(message: Message, plan: Plan, machine: Machine) -> float:
    """Return the seconds of a message; for gradients, which share messages, without the latency."""
    seconds = message_seconds(message, plan, 0, machine)
    if message.stage != names.REDUCE_GRADIENTS:
        return seconds
    least = replace(message, spans=tuple((0, 1) for _ in message.spans), size=len(message.spans))
    return max(0.0, seconds - message_seconds(least, plan, 0, machine))


def _cheapest(
    row: Sequence[LayerCall], tp_size: int, ranks: int, itemsize: int, cost: Cost
) -> tuple[float, dict[str, Channels]]:
    """Return a row's lowest cost and its split layers, by dynamic programming along the row."""
    best: Ways = {Place(): (0.0, {})}
    for call in row:
        longer: dict[Place, tuple[float, dict[str, Channels]]] = {}
        for before, (so_far, axes) in best.items():
            for place in _places(call, before, call is row[-1], tp_size):
                total = so_far + cost(layer_messages(call, place, tp_size, ranks, itemsize))
                if place not in longer or total < longer[place][0]:
                    longer[place] = total, axes | ({call.name: place.axis} if place.axis else {})
        best = longer
    return min(best.values(), key=lambda way: way[0])


def _places(call: LayerCall, before: Place, last: bool, tp_size: int) -> Iterator[Place]:
    """Yield the possible roles of a layer that follows one with the role `before`.

    Of two consecutive split layers, the first one passes slices on to the second.
    """
    if not before.gives:
        yield Place()
    if before.axis is None or before.gives:
        for axis in CHANNELS if tp_size > 1 else ():
            if call.can_split(axis, tp_size):
                yield Place(axis, before.gives, False)
                if not last and call.can_split("outputs", tp_size):  # into equal slices
                    yield Place(axis, before.gives, True)


def _rows(calls: Sequence[LayerCall]) -> list[list[LayerCall]]:
    """Return the layers in rows, in which each layer follows the previous one."""
    rows: list[list[LayerCall]] = []
    for call in calls:
        if call.follows and rows and rows[-1][-1].name == call.follows:
            rows[-1].append(call)
        else:
            rows.append([call])
    return rows
