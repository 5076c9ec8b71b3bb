"""Votes: a few values per rank that are sent with the gradients."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from mpikfac.layers.uncovered import Statistic

VOTES = 16  # blocks of arenas begin at multiples of 16 elements, so fewer votes would save no bytes
SKIP, CHANGED, *BITS = range(VOTES - 8, VOTES)  # reserved for the library


class Votes(Statistic):
    """Send a few values per rank with the gradients; after the step, hold their means over ranks.

    This way, ranks exchange small facts without additional messages.

    The first 8 votes belong to the program, the last 8 to the library. Each of the last 6 is one
    bit of a checksum, as 1 or -1: the absolute value of its mean over ranks is 1 if and only if all
    ranks have the same bit. Reductions of other values would be rounded, so a single different
    value among many ranks could go unnoticed. A checksum misses a difference with probability 1/64.
    The checksum changes from step to step, because the step is one of the values.

    Attributes:
        heard: the means of the votes that `counted` selects, if the host has already read them when
            `read` is called; otherwise empty.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__("(votes)", torch.zeros(VOTES, dtype=dtype, device=device))
        self.heard: list[float] = []

    def abort_batch(self) -> None:
        """Do nothing: votes are kept until they are sent."""

    def mark(self, values: object, changed: bool) -> None:
        """Set this rank's votes: a checksum of `values`, and whether its model has changed.

        `values` must be equal on all ranks; `read` returns whether their checksums are.
        """
        self.heard = []
        checksum = hashlib.blake2b(repr(values).encode(), digest_size=1).digest()[0]
        bits = [1 if checksum >> place & 1 else -1 for place in range(len(BITS))]
        votes = torch.tensor([changed, *bits], dtype=self.tensor.dtype, device="cpu")
        self.counted(self.tensor).copy_(votes, non_blocking=True)

    def counted(self, votes: Tensor) -> Tensor:
        """Return a view of the `votes` whose means over ranks `read` uses."""
        return votes[..., CHANGED:]

    def read(self) -> tuple[bool, bool]:
        """Return whether any rank's model has changed, and whether all checksums are equal."""
        means, self.heard = self.heard or self.counted(self.tensor).tolist(), []
        changed, *bits = means
        return changed > 0, min(map(abs, bits)) > 1 - 1e-4
