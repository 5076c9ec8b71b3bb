from __future__ import annotations

import pytest
import torch

from mpikfac.numerics import Arena
from mpikfac.plan import lay_out

SHAPES = {"a": (2, 3), "b": (4,), "c": (2, 3), "d": (4,), "e": (2, 3), "f": (2, 3)}


@pytest.mark.parametrize(
    ("names", "is_stack"),
    [
        (["a"], True),
        (["a", "c", "e"], True),
        (["e", "f"], True),
        (["a", "c", "f"], False),  # at other distances
        (["e", "c", "a"], False),  # backward
        (["a", "b"], False),  # of other shapes
    ],
)
def test_equal_blocks_at_even_distances_are_a_stack(names, is_stack):
    """Oracle: the blocks one by one; a change of the stack changes the blocks."""
    arena = Arena(lay_out([SHAPES.items()]), torch.float64, torch.device("cpu"))
    arena.flat.copy_(torch.arange(len(arena.flat)))
    stack = arena.stack(names)
    assert (stack is not None) == is_stack
    if stack is not None:
        assert torch.equal(stack, torch.stack([arena[name] for name in names]))
        stack.zero_()
        assert not any(arena[name].any() for name in names)
