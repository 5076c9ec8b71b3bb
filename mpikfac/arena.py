"""A flat tensor and its named views."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mpikfac.plan import Layout


class Arena:
    """All tensors of one kind in one flat buffer that MPI can send without a copy.

    Attributes:
        layout: where each block lies.
        flat: the buffer, zero at first, `[layout.size]`; its address never changes.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)
        self._views = {name: self._view(name) for name in layout.shapes}

    def __getitem__(self, name: str) -> Tensor:
        """The block `name`, a view that shares memory with `flat`."""
        return self._views[name]

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def segment(self, index: int) -> Tensor:
        """Segment `index` of the layout, a view."""
        start, stop = self.layout.bounds[index : index + 2]
        return self.flat[start:stop]

    def _view(self, name: str) -> Tensor:
        start, shape = self.layout.offsets[name], self.layout.shapes[name]
        return self.flat[start : start + math.prod(shape)].view(shape)
