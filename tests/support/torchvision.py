"""Stand in for torchvision while timm is imported: timm's networks need torchvision's names alone.

torchvision itself would bring a torch of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch import nn

NAME = "torchvision"


class _Named(type):
    """A class in which every public name is a text: the name itself, as for members of an enum."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A package in which every public name is an empty class."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Named(name, (nn.Module,), {})


class _Finder:
    """Find a stand-in for every module of torchvision."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a stand-in; None for modules outside of torchvision."""
        if name.partition(".")[0] != NAME:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stand-in as it is."""


@contextmanager
def stand_in() -> Iterator[None]:
    """Inside, torchvision can be imported even if torchvision is not installed."""
    if importlib.util.find_spec(NAME):
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
