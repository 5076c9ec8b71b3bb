"""Access the local shard of a parameter that is sharded over ranks, without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a `DTensor`, whose elements are distributed over ranks."""
    # The class is not imported, because that takes longer than importing this whole library.
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return the rank's elements of a sharded tensor, as a view; return other tensors unchanged."""
    elements: Tensor = tensor
    if is_sharded(tensor):
        with torch.no_grad():  # otherwise, the elements are a view with its own version counter
            elements = tensor.to_local()
    return elements
