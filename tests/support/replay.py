"""Record the operators of a function once, and run them again, as a CUDA graph does, on a CPU.

As in a CUDA graph, a replay uses the addresses of the recording and the host's values at the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("_local_scalar_dense", "nonzero", "item", "_pin_memory")


class Operators(TorchDispatchMode):
    """Keep the operators that run in the context, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run and keep an operator.

        Raises:
            AssertionError: the host reads a value from the device, or copies from or to it.
        """
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        assert not any(word in func.__name__ for word in FORBIDDEN), func
        devices = {t.device for t in tensors((args, kwargs, results)) if t.dim()}
        assert len(devices) <= 1, f"{func} between {devices}"
        inputs = {storage(tensor) for tensor in tensors((args, kwargs))}
        fresh = [t for t in tensors(results) if t.numel() and storage(t) not in inputs]
        if fresh or func._schema.is_mutable:  # a view starts no kernel
            self.kept.append((func, args, kwargs, tensors(results) if fresh else []))
        return results

    def replay(self) -> None:
        """Run the operators again, with results at the same addresses as in the first run."""
        for func, args, kwargs, places in self.kept:
            results = tensors(func(*args, **kwargs))
            for place, result in zip(places, results):
                place.copy_(result)


def tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors among nested values."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


class Recorder:
    """Record as a CUDA graph does, and count recordings and replays."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        """Run `compute` once, and return the replay."""
        self.recordings += 1
        operators = Operators()
        with torch.no_grad(), operators:
            compute()

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                operators.replay()

        return replay
