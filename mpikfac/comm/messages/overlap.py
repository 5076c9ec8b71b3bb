"""Overlap reductions over ranks with computation, in a thread that calls MPI.

The thread's buffers are in host memory, because Open MPI crashes in non-blocking reductions of
device buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mpikfac.comm.messages.buffers import Buffers, synchronize
from mpikfac.comm.messages.collectives import SUMS, op_of
from mpikfac.comm.messages.encoded import Encoded
from mpikfac.comm.messages.outbox import Outbox, Piece
from mpikfac.comm.messages.patient import Patient, sleep_until
from mpikfac.comm.mpi import MPI
from mpikfac.plan import BATCH, Layout, Message
from mpikfac.trace import Trace


class OverlappedSums:
    """Send an arena's messages during computation, each as soon as its blocks are ready.

    Collective over: world, in any order and at any time.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        layout: Layout,
        send: Callable[[int], None],
        wait: Callable[[int], None],
    ) -> None:
        self._send, self._wait = send, wait
        self._message_of = {
            name: index
            for name, offset in layout.offsets.items()
            for index, message in enumerate(messages)
            if any(start <= offset < stop for start, stop in message.spans)
        }
        self._missing = Counter(self._message_of.values())
        self.ready_blocks: set[str] = set()

    def ready(self, block: str) -> None:
        """Mark a block as ready; its values must not change until `wait` returns.

        Raises:
            RuntimeError: the block was already ready.
        """
        if block in self.ready_blocks:
            raise RuntimeError(
                f"{block!r} was sent before this backward pass; with overlap=True a step needs one "
                f"backward pass that uses each layer once; after a step that raised an error, "
                f"call trainer.load_state_dict(trainer.state_dict()) on all ranks"
            )
        self.ready_blocks.add(block)
        index = self._message_of[block]
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._send(index)

    def wait(self) -> None:
        """Wait until all messages are sent; all blocks must be ready."""
        for index in self._missing:
            self._wait(index)
        self._missing = Counter(self._message_of.values())
        self.ready_blocks.clear()

    def abort_batch(self, world: MPI.Intracomm) -> None:
        """Drop a batch that no step will use; if a rank has begun to send it, send the rest first.

        Collective over: world.
        """
        if any(world.allgather(bool(self.ready_blocks))):
            for block in self._message_of.keys() - self.ready_blocks:
                self.ready(block)
            self.wait()


class ProgressThread:
    """Run the thread that sends overlapped reductions over the communicator `world`.

    Collective over: world.

    Attributes:
        comm: a duplicate of `world`, used only by this thread.

    Raises:
        ValueError: MPI does not support calls from several threads.
    """

    def __init__(
        self, world: MPI.Intracomm, trace: Trace, device: torch.device, kept: dict[Hashable, Tensor]
    ) -> None:
        """Start the thread; the arenas are on `device`, and `kept` is `Encoded.memory`."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ValueError("overlap=True needs an MPI library that supports THREAD_MULTIPLE")
        self.comm = world.Dup()
        self._patient = cast(MPI.Intracomm, Patient(self.comm))  # has the collectives needed here
        self._trace = trace
        self._buffers = Buffers(trace, direct=False)
        self._encoded = Encoded(direct=False, memory=kept)
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._numbered = 0
        self._flights = count(1)
        self._outbox = Outbox(self._ask)

    def overlapped(
        self, messages: Sequence[Message], layout: Layout, flat: Tensor, urgency: int
    ) -> OverlappedSums:
        """Return a sender for the messages of `flat`.

        Collective over: world; in the same order on all ranks, before any message is sent.
        """
        first = self._numbered
        self._numbered += len(messages)

        def send(index: int) -> None:
            self._outbox.put(first + index, urgency, self._pieces(messages[index], flat))

        def wait(index: int) -> None:
            with self._trace.stage(messages[index].stage):
                self._outbox.wait(first + index)

        return OverlappedSums(messages, layout, send, wait)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._outbox.flush()

    def close(self) -> None:
        """End the thread once all messages are sent.

        Collective over: world.

        Raises:
            UserError: other ranks do not take part in one of this rank's messages.
        """
        self._outbox.close()

    def _ask(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Start determining which messages are in `numbers` on all ranks."""
        # Both buffers are rows of one array, which stays alive because `answer` refers to a row;
        # mpi4py does not keep the buffers of non-blocking operations alive.
        ready, everywhere = np.zeros((2, self._numbered), np.uint8)
        ready[numbers] = 1
        request = self.comm.Iallreduce(ready, everywhere, MPI.BAND)

        def answer() -> list[int]:
            sleep_until(request)
            return np.flatnonzero(everywhere).tolist()

        return answer

    def _pieces(self, message: Message, flat: Tensor) -> list[Piece]:
        """Return the pieces of a message, which the outbox's thread will send."""
        flight = next(self._flights)
        ready = None if flat.is_cpu else torch.Event(flat.device)
        if ready is not None:
            ready.record()
        if message.codec and message.primitive not in SUMS:
            size = sum(stop - start for start, stop in message.spans)
            return [Piece(size, partial(self._send_encoded, message, flat, flight, ready))]
        ((start, stop),) = message.spans
        return [
            Piece(len(part), partial(self._send_piece, message, part, flight, ready))
            for part in flat[start:stop].split(BATCH)
        ]

    def _send_encoded(
        self, message: Message, flat: Tensor, flight: int, ready: torch.Event | None
    ) -> None:
        if ready is not None:
            ready.synchronize()
        with (
            self._stream or nullcontext(),
            self._trace.stage(message.stage, message.over, message.bytes, flight),
        ):
            self._encoded.exchange(self._patient, message, flat)
            synchronize(flat)

    def _send_piece(
        self, message: Message, piece: Tensor, flight: int, ready: torch.Event | None
    ) -> None:
        if ready is not None:
            ready.synchronize()
        with self._stream or nullcontext():
            if not message.codec:
                self._sum(message, piece, flight)
                return
            rounded = piece.to(torch.bfloat16)
            self._sum(message, rounded.view(torch.int16), flight)
            piece.copy_(rounded)
            synchronize(piece)

    def _sum(self, message: Message, numbers: Tensor, flight: int) -> None:
        """Reduce `numbers` with MPI; bfloat16 values are passed to it as integers."""
        with (
            self._buffers.on_host(numbers, message.stage) as buffer,
            self._trace.stage(message.stage, message.over, numbers.nbytes, flight),
        ):
            if message.primitive == "Allreduce":
                self._patient.Allreduce(MPI.IN_PLACE, buffer, op_of(message))
            elif self.comm.rank == message.root:
                self._patient.Reduce(MPI.IN_PLACE, buffer, op_of(message), message.root)
            else:
                self._patient.Reduce(buffer, None, op_of(message), message.root)
