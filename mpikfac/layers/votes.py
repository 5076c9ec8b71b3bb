"""Share small facts of ranks as votes, sent with the gradients."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from mpikfac.layers.uncovered import Statistic

VOTES = 16  # blocks of arenas begin at multiples of 16 elements: fewer votes would save no bytes
SKIP, CHANGED, *BITS = range(VOTES - 8, VOTES)  # votes of the library itself


class Votes(Statistic):
    """Send a few numbers of the rank with the gradients; after the step, hold means over ranks.

    Ranks share small facts as votes without an extra message.

    A program has the first 8 votes, the library has the others. Each of the last 6 votes is a bit
    of a checksum, 1 or -1: the mean over ranks has the size 1 if and only if all ranks have the
    same bit. Sums of other numbers would be rounded, and a single rank would be lost among many
    ranks. A checksum misses a difference with a chance of 1 in 64. The checksum of the next step is
    another one, because the step is part of the values.

    Attributes:
        heard: the `counted` means, if the host has read the means before `read`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__("(votes)", torch.zeros(VOTES, dtype=dtype, device=device))
        self.heard: list[float] = []

    def abort_batch(self) -> None:
        """Keep the votes: votes stay until sent."""

    def mark(self, values: object, changed: bool) -> None:
        """Vote on `values`, which all ranks must have alike, and on a change of the model."""
        self.heard = []
        checksum = hashlib.blake2b(repr(values).encode(), digest_size=1).digest()[0]
        bits = [1 if checksum >> place & 1 else -1 for place in range(len(BITS))]
        votes = torch.tensor([changed, *bits], dtype=self.tensor.dtype, device="cpu")
        self.counted(self.tensor).copy_(votes, non_blocking=True)

    def counted(self, votes: Tensor) -> Tensor:
        """Return the part of the means over ranks that `read` takes, a view."""
        return votes[..., CHANGED:]

    def read(self) -> tuple[bool, bool]:
        """Return whether any rank voted for a change, and whether all checksums are equal."""
        means, self.heard = self.heard or self.counted(self.tensor).tolist(), []
        changed, *bits = means
        return changed > 0, min(map(abs, bits)) > 1 - 1e-4
