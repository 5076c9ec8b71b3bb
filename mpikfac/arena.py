"""A flat tensor and its named views."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpikfac.layout import Layout


class Arena(dict[str, Tensor]):
    """All tensors of one kind, by name: views of one flat buffer that MPI sends without a copy.

    Attributes:
        layout: where each block lies.
        flat: the buffer, zero at first, `[layout.size]`; its address never changes.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)
        for name, shape in layout.shapes.items():
            start = layout.offsets[name]
            self[name] = self.flat[start : start + math.prod(shape)].view(shape)

    def segment(self, index: int) -> Tensor:
        """Segment `index` of the layout, a view."""
        start, stop = self.layout.bounds[index : index + 2]
        return self.flat[start:stop]
