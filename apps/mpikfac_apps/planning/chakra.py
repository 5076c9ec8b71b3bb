"""Write the steps of a plan as Chakra execution traces, which tools like ASTRA-sim can simulate.

A trace is a file for one rank. It contains protobuf messages, each preceded by its length: first
the metadata, then the nodes, as defined in schema/protobuf/et_def.proto of mlcommons/chakra. The
encoding takes only a few lines, so the program does not depend on protobuf.

Nodes follow one another in the order of the step; overlapped messages are no exception. A
collective is a single node, even if it is sent in pieces. In Chakra, all ranks contribute shards of
equal size to a gather, so the mean size of the shards is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac.plan import PASSED, Message, Plan, passed

KINDS = {"ordinary": (False, False), "factors": (True, False), "refresh": (True, True)}
"""Whether each kind of step computes new factors, and new bases."""
VERSION = "0.0.4"
COMPUTATION, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # enum NodeType
COLLECTIVES = {
    **{"Allreduce": 0, "Reduce": 1, "Allgatherv": 2, "Bcast": 5, "Alltoall": 6},
    "Reduce_scatter": 7,
}
"""The values of enum CollectiveCommType."""
FIELDS = {bool: 27, int: 9, str: 30}  # field numbers of an AttributeProto's value
Groups = dict[tuple[int, ...], int]
"""The number that identifies each communicator except the world, by the communicator's ranks."""


def write_traces(plan: Plan, path: Path, prediction: mpikfac.predict.Prediction | None) -> int:
    """Write a trace for each rank and kind of step, PATH.KIND.RANK.et, and PATH.groups.json.

    Return the number of traces.

    Args:
        prediction: contains the times of computations on the slowest rank; None for traces that
            contain only messages.

    Raises:
        ValueError: a message has no counterpart in Chakra, or the plan has kinds of steps other
            than `KINDS`.
        OSError: a file cannot be written.
    """
    _check_kinds(plan)
    groups: Groups = {}
    traces: dict[str, bytes] = {}  # created before any file, because a message may be unsupported
    for kind, (statistics, refresh) in KINDS.items():
        step = getattr(prediction, kind).stages if prediction else {}
        for rank in range(plan.ranks):
            messages = plan.messages(rank, statistics, refresh)
            content = [field(1, VERSION), *nodes(plan, rank, messages, step, groups)]
            traces[f"{kind}.{rank}.et"] = b"".join(map(behind_length, content))
    for name, trace in traces.items():
        files.write_bytes(path.with_name(f"{path.name}.{name}"), trace, named=True)
    members = {str(number): list(ranks) for ranks, number in groups.items()}
    listing = path.with_name(f"{path.name}.groups.json")
    files.write_text(listing, json.dumps(members) + "\n", named=True)
    return len(traces)


def _check_kinds(plan: Plan) -> None:
    """Check that the plan has no kinds of steps other than `KINDS`.

    Raises:
        ValueError: refreshes have slots, or ranks exchange something other than gradients.
    """
    stagger, sync = plan.strategy.refresh.stagger, plan.strategy.sync
    if stagger > 1:
        raise ValueError(
            f"export: refresh.stagger={stagger} refreshes in slots, which a trace cannot show; use "
            f"refresh.stagger=1"
        )
    if sync.local_steps or not sync.waits_for_all:
        raise ValueError(
            f"export: sync={sync.name} takes steps without an exchange, which a trace cannot show; "
            f"use sync=synchronous"
        )


def nodes(
    plan: Plan,
    rank: int,
    messages: Sequence[Message],
    step: Mapping[str, float],
    groups: Groups,
) -> Iterator[bytes]:
    """Yield the nodes of a step: computing stages by name, and messages in the stages' order.

    Each node depends on the previous one, except that the sends and receives of a message that is
    not a collective all begin at the same time.

    Args:
        step: seconds by stage, in the order of the step; empty for messages alone.
        groups: the communicators of previous messages; those of `messages` are added.
    """
    of_stages: dict[str, list[Message]] = {stage: [] for stage in step}
    for message in messages:
        of_stages.setdefault(message.stage, []).append(message)
    number, before = 0, list[int]()
    for stage, sent in of_stages.items():
        parts = [of_message(plan, rank, message, groups) for message in sent]
        for together in parts or computation(step[stage]):
            first = number
            for content in together:
                depends = b"".join(field(5, earlier) for earlier in before)
                yield field(1, number) + field(2, stage) + content + depends
                number += 1
            before = list(range(first, number)) or before


def computation(seconds: float) -> list[list[bytes]]:
    """Return the content of the node of a stage that computes for `seconds`."""
    duration = field(7, round(seconds * 1e6))
    return [[field(3, COMPUTATION) + duration + attribute("is_cpu_op", False)]]


def of_message(plan: Plan, rank: int, message: Message, groups: Groups) -> list[bytes]:
    """Return the content of a message's nodes: one for a collective, or all sends and receives.

    Raises:
        ValueError: the message has no counterpart in Chakra.
    """
    team = tuple(plan.grid.team(rank, message.over))
    if message.primitive == PASSED:
        return list(passing(message, team, team.index(rank)))
    if message.rule:
        raise ValueError(
            f"export: stage {message.stage!r} aggregates with a rule other than the mean, which "
            f"Chakra does not support; use sync.aggregation=mean and sync.factor_aggregation=mean"
        )
    if message.primitive not in COLLECTIVES:
        others = f"a strategy with {', '.join(COLLECTIVES)} only"
        raise ValueError(
            f"export: {message.primitive} of {message.stage!r} has no counterpart in Chakra; "
            f"use {'fully_shard=false' if plan.sharding else others}"
        )
    gathers = message.primitive == "Allgatherv"
    size = message.size // len(team) if gathers else message.size
    attributes: dict[str, Any] = {"comm_type": COLLECTIVES[message.primitive], "comm_size": size}
    if message.root >= 0:
        attributes["root"] = team[message.root]
    if len(team) < plan.ranks:
        attributes["pg_name"] = str(groups.setdefault(team, len(groups) + 1))
    return [node(COLLECTIVE, attributes)]


def passing(message: Message, team: Sequence[int], member: int) -> Iterator[bytes]:
    """Yield the content of the nodes in which a member sends to and receives from other members."""
    moves = passed(message.spans, message.to)
    itemsize = message.size // sum(move.size for move in moves)
    for move in moves:
        if member in (move.source, move.target):
            attributes = {
                "comm_src": team[move.source],
                "comm_dst": team[move.target],
                "comm_size": move.size * itemsize,
                "comm_tag": move.start,
            }
            yield node(SEND if member == move.source else RECEIVE, attributes)


def node(kind: int, attributes: Mapping[str, Any]) -> bytes:
    """Return the content of a message node."""
    values = b"".join(attribute(name, value) for name, value in attributes.items())
    return field(3, kind) + attribute("is_cpu_op", False) + values


# -- protobuf --------------------------------------------------------------------------------------


def attribute(name: str, value: bool | int | str) -> bytes:
    """Return a node's field for an attribute, given the attribute's name and value."""
    return field(10, field(1, name) + field(FIELDS[type(value)], value))


def field(number: int, value: int | str | bytes) -> bytes:
    """Return a field: a non-negative integer, or a string or message preceded by its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + behind_length(content)


def behind_length(content: bytes) -> bytes:
    """Return bytes preceded by their length."""
    return varint(len(content)) + content


def varint(value: int) -> bytes:
    """Return a non-negative integer in 7 bits per byte, the lowest bits first."""
    digits = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])
