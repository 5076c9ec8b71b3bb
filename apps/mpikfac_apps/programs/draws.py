"""Random numbers that depend only on given numbers, such as the seed and a step."""

from __future__ import annotations

import numpy as np
import torch


def mixed(*numbers: int) -> int:
    """Return a seed that depends on all `numbers`, because torch uses only 32 bits of a seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def generator(*numbers: int) -> torch.Generator:
    """Return a generator on the CPU whose draws depend on all `numbers` (each >= 0)."""
    return torch.Generator().manual_seed(mixed(*numbers))
