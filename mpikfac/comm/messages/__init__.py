"""Ways to send a message: as it is, encoded, combined by a rule, or overlapped; and the buffers."""

from __future__ import annotations

from mpikfac.comm.messages.buffers import MAX_COUNT, SUMMABLE, Buffers, check_summable
from mpikfac.comm.messages.collectives import (
    COPIES,
    PRIMITIVES,
    SUMS,
    sent_elements,
    sum_in_order,
)
from mpikfac.comm.messages.encoded import Encoded
from mpikfac.comm.messages.overlap import OverlappedSums, ProgressThread
from mpikfac.comm.messages.robust import Combiner
from mpikfac.comm.messages.senders import InOrder, Overlapped, Sender, Turns

__all__ = [
    "COPIES",
    "MAX_COUNT",
    "PRIMITIVES",
    "SUMMABLE",
    "SUMS",
    "Buffers",
    "Combiner",
    "Encoded",
    "InOrder",
    "Overlapped",
    "OverlappedSums",
    "ProgressThread",
    "Sender",
    "Turns",
    "check_summable",
    "sent_elements",
    "sum_in_order",
]
