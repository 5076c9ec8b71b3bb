"""Let models of `torch.compile` run without their compiled code for a time."""

from __future__ import annotations

from typing import Any

import torch

_HOLDERS: set[Eagerly] = set()
_STANCES: list[Any] = []  # the last that was taken here


class Eagerly:
    """Let all compiled models of the process run eagerly until `remove`.

    A compiled model does not look for new hooks. The stance of torch's compiler is one for the
    process, so several holders share the stance. A stance that the program takes meanwhile stays.
    """

    def __init__(self) -> None:
        torch.compiler.disable(self._hold)()  # no stance changes inside of compiled code

    def remove(self) -> None:
        """Let compiled models run as before, once the last holder is removed."""
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
    """Return whether the stance in force was taken here; torch has no public question."""
    return any(taken.stance is torch._dynamo.eval_frame._stance for taken in _STANCES)
