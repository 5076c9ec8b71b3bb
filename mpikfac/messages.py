"""Collectives as plain data: which elements of an arena travel, over whom, by which primitive."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from mpikfac.layout import Layout, Span

Kind = Callable[[str], Hashable]


@dataclass(frozen=True)
class Message:
    """One collective of a step as one rank sees it.

    Attributes:
        stage: the stage of `KFAC.step` that sends it.
        primitive: the MPI collective.
        over: "world", "column" or "row", or a part of one as in `levels`.
        spans: where in the stage's arena it is: first and last (exclusive) element, of each
            member's part in turn for Reduce_scatter, Alltoall and Allgatherv.
        root: the member that a Reduce goes to, or that a Bcast comes from.
        size: bytes of all spans.
        bytes: of these, what this rank hands to MPI.
        wire: bytes that this rank sends if the collective is a ring.
    """

    stage: str
    primitive: str
    over: str
    spans: tuple[tuple[int, int], ...]
    root: int
    size: int
    bytes: int
    wire: int


def sums(
    stage: str,
    layout: Layout,
    kind: Kind,
    ranks: int,
    itemsize: int,
    primitive: str = "Reduce_scatter",
) -> list[Message]:
    """What sums an arena over the world: everywhere, or segment r on rank r if it has several.

    Neighbouring blocks of one `kind` share a message; those of kind None are left out. Where all
    segments are of one kind, their sums are one `primitive`, Reduce_scatter or Alltoall.
    """
    spans = [span for span in layout.spans(kind) if span.kind is not None]
    if ranks == 1 or not spans:
        return []
    if len(layout.bounds) == 2:
        return [
            message(stage, "Allreduce", "world", [(span.start, span.stop)], ranks, itemsize)
            for span in spans
        ]
    if _alike(spans):
        return [message(stage, primitive, "world", _parts(layout, spans, ranks), ranks, itemsize)]
    return [
        message(stage, "Reduce", "world", [(s.start, s.stop)], ranks, itemsize, root=s.segment)
        for s in spans
    ]


def in_order(stage: str, layout: Layout, ranks: int, itemsize: int) -> list[Message]:
    """What sums an arena from rank to rank, the same to the last bit on any number of them."""
    if ranks == 1 or layout.size == 0:
        return []
    return [message(stage, "Send, Bcast", "world", [(0, layout.size)], ranks, itemsize)]


def gathers(
    stage: str, over: str, layout: Layout, kind: Kind, own: int, members: int, itemsize: int
) -> list[Message]:
    """What gives every member of `over` the segments of all; this rank is member `own`.

    Neighbouring blocks of one `kind` share a message; those of kind None are left out, as are
    segments behind those of the members.
    """
    spans = [s for s in layout.spans(kind) if s.kind is not None and s.segment < members]
    if members == 1 or not spans:
        return []
    if not _alike(spans):
        return [
            message(stage, "Bcast", over, [(s.start, s.stop)], members, itemsize, own, s.segment)
            for s in spans
        ]
    parts = _parts(layout, spans, members)
    return [message(stage, "Allgatherv", over, parts, members, itemsize, own)]


def message(
    stage: str,
    primitive: str,
    over: str,
    spans: Sequence[tuple[int, int]],
    members: int,
    itemsize: int,
    own: int = 0,
    root: int = -1,
) -> Message:
    """The message that member `own` of `members` sends, with its bytes."""
    size = sum(stop - start for start, stop in spans) * itemsize
    handed = size
    if primitive == "Allgatherv":
        handed = (spans[own][1] - spans[own][0]) * itemsize
    elif primitive == "Bcast" and root != own:
        handed = 0
    ring = size * (members - 1) // members
    wire = {"Allreduce": 2 * ring, "Send, Bcast": size}.get(primitive, ring)
    return Message(stage, primitive, over, tuple(spans), root, size, handed, wire)


def _parts(layout: Layout, spans: Sequence[Span], members: int) -> list[tuple[int, int]]:
    """Of each member's segment its span, or nothing."""
    parts = [(bound, bound) for bound in layout.bounds[:members]]
    for span in spans:
        parts[span.segment] = (span.start, span.stop)
    return parts


def _alike(spans: Sequence[Span]) -> bool:
    return len({span.kind for span in spans}) == 1
