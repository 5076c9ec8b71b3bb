"""Exchange messages: plain, encoded, aggregated robustly, or overlapped with computation."""

from mpikfac.comm.messages.buffers import MAX_COUNT as MAX_COUNT
from mpikfac.comm.messages.buffers import SUMMABLE as SUMMABLE
from mpikfac.comm.messages.buffers import Buffers as Buffers
from mpikfac.comm.messages.buffers import check_sendable as check_sendable
from mpikfac.comm.messages.buffers import check_summable as check_summable
from mpikfac.comm.messages.collectives import COPIES as COPIES
from mpikfac.comm.messages.collectives import PRIMITIVES as PRIMITIVES
from mpikfac.comm.messages.collectives import SUMS as SUMS
from mpikfac.comm.messages.collectives import sent_elements as sent_elements
from mpikfac.comm.messages.collectives import sum_in_order as sum_in_order
from mpikfac.comm.messages.encoded import Encoded as Encoded
from mpikfac.comm.messages.overlap import OverlappedSums as OverlappedSums
from mpikfac.comm.messages.overlap import ProgressThread as ProgressThread
from mpikfac.comm.messages.robust import Combiner as Combiner
from mpikfac.comm.messages.senders import InOrder as InOrder
from mpikfac.comm.messages.senders import Overlapped as Overlapped
from mpikfac.comm.messages.senders import Sender as Sender
from mpikfac.comm.messages.senders import Turns as Turns
