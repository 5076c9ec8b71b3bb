"""Detect which gradients of earlier backward passes the program has removed before the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from mpikfac.numerics import is_sharded, local


class Retained(NamedTuple):
    """The gradients of a layer after a backward pass.

    Attributes:
        versions: the identity of each gradient, and how many times it was changed in place.
        sizes: the norms, as tensors, so that the host need not wait for their values.
        accumulated: whether the pass added to `.grad`; `torch.autograd.grad` does not.
    """

    versions: list[tuple[int, int, int]]
    sizes: Sequence[Tensor]
    accumulated: bool


class RetainedGradients:
    """The gradients that the backward passes since the last step have left in `.grad`.

    Args:
        parameters: the parameters of each layer, by name.
    """

    def __init__(self, parameters: Mapping[str, Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._retained: dict[str, Retained] = {}

    def note(self, names: Iterable[str], accumulated: bool) -> None:
        """Record the gradients of layers after a backward pass, whether or not it added to them."""
        gradients = {name: self._gradients(name) for name in names}
        # `fully_shard` sets `.grad` only after a pass that reduces gradients.
        gradients = {n: g for n, g in gradients.items() if g or not self._is_sharded(n)}
        if not any(gradients.values()):
            self._retained |= {name: Retained([], (), accumulated) for name in gradients}
            return
        with torch.no_grad():
            # One call for all layers: on a GPU, one call per layer would start a kernel for each.
            found = map(local, chain.from_iterable(gradients.values()))
            sizes = iter(torch._foreach_norm([*found], 1))
        for name, own in gradients.items():
            self._retained[name] = Retained(_versions(own), [*islice(sizes, len(own))], accumulated)

    def removed(self, accumulating: bool) -> list[str]:
        """Return the layers whose gradients are None or 0 now, but were not after a pass.

        Elements are read only if the program has changed the gradients, or after a pass of
        `torch.autograd.grad`.

        Args:
            accumulating: whether the current pass adds to `.grad`; if so, and `.grad` is still
                empty, the program has not kept what an earlier `torch.autograd.grad` returned.
        """
        removed = [
            name
            for name, retained in self._retained.items()
            if self._is_removed(name, retained, accumulating)
        ]
        return removed + self._also_removed(removed)

    def _also_removed(self, removed: Sequence[str]) -> list[str]:
        """Return sharded layers whose rows on this rank have been rewritten, and are 0, as before.

        Only other ranks can tell whether the whole gradient is now 0. This rank, whose rows of the
        gradient were always 0, assumes so if the gradients of other layers have become 0.
        """
        return [
            name
            for name in self._retained
            if removed and name not in removed and self._is_sharded(name)
            if _versions(own := self._gradients(name)) != self._retained[name].versions
            if not _any(own)
        ]

    def _is_removed(self, name: str, retained: Retained, accumulating: bool) -> bool:
        gradients = self._gradients(name)
        if not retained.accumulated:
            return accumulating and not _any(gradients)
        if gradients and _versions(gradients) == retained.versions:
            return False
        return not gradients or (any(retained.sizes) and not _any(gradients))

    def _gradients(self, name: str) -> list[Tensor]:
        return [p.grad for p in self._parameters[name] if p.grad is not None]

    def _is_sharded(self, name: str) -> bool:
        return is_sharded(self._parameters[name][0])

    def drop(self, name: str) -> None:
        """Discard the recorded gradients of a layer."""
        del self._retained[name]

    def clear(self) -> None:
        """Discard all records, at the end of a batch."""
        self._retained.clear()


def _versions(gradients: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    # An operation on a `DTensor` changes the version of the `DTensor`; an operation on the rank's
    # rows changes only the version of the rows.
    return [(id(gradient), gradient._version, local(gradient)._version) for gradient in gradients]


def _any(gradients: Iterable[Tensor]) -> bool:
    """Return whether any element of the gradients on this rank is not 0."""
    return any(bool(local(gradient).any()) for gradient in gradients)
