"""The messages of split layers, and their sizes compared with those of data-parallel layers.

Between modules, activations have one of two forms. "examples": a rank has its own examples, with
all channels. "channels": a rank has all examples of the group, with a slice of the channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpikfac.plan import names
from mpikfac.plan.choices import CHANNELS, Channels, TensorParallelPlan, span
from mpikfac.plan.layout import Shape
from mpikfac.plan.messages import Message, message


@dataclass(frozen=True)
class LayerCall:
    """The calls of a layer in a step on a rank, with their sizes.

    Attributes:
        weight: the shape of the weight: outputs, inputs, and the kernel of a convolution.
        taken: the number of elements in the inputs of all calls, for the rank's batch.
        given: the number of elements in the outputs of all calls, for the rank's batch.
        differentiated: whether the backward pass needs the gradient of the input.
        follows: the layer whose outputs reach this layer only through modules that act on each
            channel separately; "" for none.
    """

    name: str
    weight: Shape
    bias: bool
    taken: int
    given: int
    differentiated: bool = True
    follows: str = ""

    @property
    def numbers(self) -> int:
        """The number of elements in weight and bias."""
        return math.prod(self.weight) + self.bias * self.weight[0]

    def channels(self, axis: Channels) -> int:
        """Return the number of channels that are divided."""
        return self.weight[CHANNELS.index(axis)]

    def can_split(self, axis: Channels, tp_size: int) -> bool:
        """Return whether all members of a group get the same number of channels."""
        return self.channels(axis) % tp_size == 0


@dataclass(frozen=True)
class Place:
    """The role of a layer in tensor parallelism.

    Attributes:
        axis: the channels that are divided among the ranks of a group; None for a data-parallel
            layer.
        takes: whether the layer receives slices of channels from the previous split layer.
        gives: whether the layer passes slices of channels to the next split layer.
    """

    axis: Channels | None = None
    takes: bool = False
    gives: bool = False


def places(calls: Sequence[LayerCall], axes: Mapping[str, Channels]) -> dict[str, Place]:
    """Return each layer's role; of two consecutive split layers, the first passes on its slices."""
    taking = {c.name for c in calls if c.name in axes and c.follows in axes}
    giving = {call.follows for call in calls if call.name in taking}
    return {c.name: Place(axes.get(c.name), c.name in taking, c.name in giving) for c in calls}


def activation_messages(
    call: LayerCall, place: Place, tp_size: int, itemsize: int, statistics: bool = False
) -> list[Message]:
    """Return the messages of a layer's activations in a step, forward and then backward.

    Args:
        statistics: whether to include the messages for K-FAC's statistics.
    """
    if place.axis is None or tp_size == 1:
        return []

    def of(stage: str, primitive: str, count: int) -> Message:
        parts = [span(count, member, tp_size) for member in range(tp_size)]
        if primitive == "Reduce_scatter":
            parts = [(count * member, count * (member + 1)) for member in range(tp_size)]
        if primitive == "Allgather":
            parts = [(0, count)]
        return message(stage, primitive, "group", parts, tp_size, itemsize)

    forward, backward = names.EXCHANGE_ACTIVATIONS, names.EXCHANGE_ACTIVATION_GRADIENTS
    inputs, outputs = call.taken, call.given
    if place.axis == "outputs":
        sent = [of(forward, "Allgather", inputs)]
        sent += [] if place.gives else [of(forward, "Alltoall", outputs)]
        sent += [] if place.gives else [of(backward, "Alltoall", outputs)]
        sent += [of(backward, "Reduce_scatter", inputs)] if call.differentiated else []
    else:
        sent = [] if place.takes else [of(forward, "Alltoall", inputs)]
        sent += [of(forward, "Reduce_scatter", outputs), of(backward, "Allgather", outputs)]
        turned = call.differentiated and not place.takes
        sent += [of(backward, "Alltoall", inputs)] if turned else []
    if statistics:
        stage = names.EXCHANGE_SPLIT_STATISTICS
        sent += [of(stage, "Alltoall", inputs)] if place.takes else []
        sent += [of(stage, "Alltoall", outputs)] if place.gives else []
    return sent


def gradient_messages(
    numbers: int, split: bool, tp_size: int, ranks: int, itemsize: int
) -> list[Message]:
    """Return the messages of a layer's gradient, as if they were not fused with other messages."""
    stage, peers = names.REDUCE_GRADIENTS, ranks // tp_size
    if not split or tp_size == 1:
        unsplit = [message(stage, "Allreduce", "world", [(0, numbers)], ranks, itemsize)]
        return unsplit if ranks > 1 else []
    slices = [span(numbers, member, tp_size) for member in range(tp_size)]
    gathered = message(stage, "Allgatherv", "group", slices, tp_size, itemsize)
    if peers == 1:
        return [gathered]
    return [message(stage, "Allreduce", "peers", slices[:1], peers, itemsize), gathered]


def layer_messages(
    call: LayerCall, place: Place, tp_size: int, ranks: int, itemsize: int
) -> list[Message]:
    """Return the messages of a layer in a first-order step."""
    split = place.axis is not None
    return [
        *activation_messages(call, place, tp_size, itemsize),
        *gradient_messages(call.numbers, split, tp_size, ranks, itemsize),
    ]


def wire_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes that a rank sends if all collectives are rings."""
    return sum(message.wire for message in messages)


# -- text -----------------------------------------------------------------------------------------


def tensor_parallel_table(
    calls: Sequence[LayerCall], tp_plan: TensorParallelPlan, ranks: int, itemsize: int = 4
) -> str:
    """Return a table with each layer's split, and with the bytes that a rank sends for it per step.

    The last column shows the bytes that the rank would send if the layer were data-parallel.
    """
    at = places(calls, tp_plan.layers)
    groups = "without split layers"
    if tp_plan.layers:
        kind = "strided" if tp_plan.strided else "neighbouring"
        groups = f"in groups of {tp_plan.tp_size} {kind} ranks"
    lines = [
        f"{ranks} ranks {groups}; MiB that a rank sends per step, in rings",
        f"{'layer':<20} {'data':>5} {'model':>5}  {'split':<8} {'takes':<9} {'gives':<9} "
        f"{'activations':>11} {'gradients':>10} {'together':>9} {'data parallel':>13}",
    ]
    totals = [0, 0]
    for call in calls:
        place, form = at[call.name], ("examples", "channels")
        tp_size = tp_plan.tp_size if place.axis else 1
        moved = wire_bytes(activation_messages(call, place, tp_size, itemsize))
        gradients = gradient_messages(call.numbers, bool(place.axis), tp_size, ranks, itemsize)
        reduced = wire_bytes(gradients)
        unsplit = wire_bytes(gradient_messages(call.numbers, False, 1, ranks, itemsize))
        totals = [totals[0] + moved + reduced, totals[1] + unsplit]
        sizes = "".join(
            f"{size / 2**20:>{width}.3f}"
            for size, width in ((moved, 12), (reduced, 11), (moved + reduced, 10), (unsplit, 14))
        )
        lines.append(
            f"{call.name:<20} {ranks // tp_size:>5} {tp_size:>5}  {place.axis or '-':<8} "
            f"{form[place.takes]:<9} {form[place.gives]:<9}{sizes}"
        )
    lines.append(f"{'together':<62}{'':>23}{totals[0] / 2**20:>10.3f}{totals[1] / 2**20:>14.3f}")
    return "\n".join(lines)
