"""Let models of `torch.compile` run without their compiled code for a time."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_HOLDERS: weakref.WeakSet[object] = weakref.WeakSet()
_STANCES: list[Any] = []


def run_eagerly(holder: object, on: bool) -> None:
    """Let all compiled models of the process run eagerly while a holder lives and is `on`.

    A compiled model does not look for new hooks. The stance of torch's compiler is one for the
    process, so several holders share the stance.
    """
    if on and holder not in _HOLDERS:
        _HOLDERS.add(holder)
        weakref.finalize(holder, _follow)
    elif not on:
        _HOLDERS.discard(holder)
    torch.compiler.disable(_follow)()  # no stance changes inside of compiled code


def _follow() -> None:
    """Take the stance that the living holders need."""
    eager = any(True for _ in _HOLDERS)
    if eager and not _STANCES:
        _STANCES.append(torch.compiler.set_stance("force_eager"))
    elif not eager and _STANCES:
        _STANCES.pop().__exit__(None, None, None)
