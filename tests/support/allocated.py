"""Count the bytes of all tensors that exist at a time."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Allocated(TorchDispatchMode):
    """Count the storages of tensors that operations create, until they are freed.

    Attributes:
        peak: the largest number of bytes so far.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in (*args, *(kwargs or {}).values()):
            if isinstance(tensor, torch.Tensor):  # those from before are not counted
                self._known.setdefault(tensor.untyped_storage(), 0)
        found = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, found)
        return found

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known[storage] = storage.nbytes()
            self._change(storage.nbytes())
            weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, size):
        self._now += size
        self.peak = max(self.peak, self._now)
