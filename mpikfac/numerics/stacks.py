"""Find tensors that one call on a GPU can take together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def alike(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names in lists of equal shape and dtype; on the CPU, every name alone.

    A GPU spends as long on the start of a small kernel as on the kernel. On the CPU a stack would
    only be a copy.
    """
    found: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        key = name if tensor.is_cpu else (tensor.shape, tensor.dtype)
        found.setdefault(key, []).append(name)
    return list(found.values())
