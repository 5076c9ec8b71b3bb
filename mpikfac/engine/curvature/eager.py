"""Temporarily run models compiled by `torch.compile` eagerly."""

from __future__ import annotations

from typing import Any

import torch

_HOLDERS: set[Eagerly] = set()
_STANCES: list[Any] = []  # the last stance that this module set


class Eagerly:
    """Make all compiled models of the process run eagerly until `remove` is called.

    A compiled model does not notice new hooks. The stance of torch's compiler is global to the
    process, so all instances share it. A stance that the program sets in the meantime is kept.
    """

    def __init__(self) -> None:
        torch.compiler.disable(self._hold)()  # compiled code must not change the stance

    def remove(self) -> None:
        """Make compiled models run normally again, once the last instance is removed."""
        torch.compiler.disable(self._release)()

    def _hold(self) -> None:
        _HOLDERS.add(self)
        if not _is_taken():
            _STANCES[:] = [torch.compiler.set_stance("force_eager")]

    def _release(self) -> None:
        _HOLDERS.discard(self)
        if not _HOLDERS and _is_taken():
            _STANCES.pop().__exit__(None, None, None)


def _is_taken() -> bool:
    """Return whether this module set the current stance, which is a private variable of torch."""
    return any(taken.stance is torch._dynamo.eval_frame._stance for taken in _STANCES)
