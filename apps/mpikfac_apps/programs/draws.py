"""Random generators seeded by several integers, such as the seed of a run and a step."""

from __future__ import annotations

import numpy as np
import torch


def mixed(*numbers: int) -> int:
    """Hash `numbers` into a 32-bit seed, because torch uses only 32 bits of a seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def generator(*numbers: int) -> torch.Generator:
    """Return a generator on the CPU whose draws depend on all `numbers` (each >= 0)."""
    return torch.Generator().manual_seed(mixed(*numbers))
