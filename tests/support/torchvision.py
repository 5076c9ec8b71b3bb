"""Replace torchvision during the import of timm, which only needs torchvision's names.

Installing the real torchvision would also install another version of torch.
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
    """A class whose public attributes are their own names as strings, like an enum's members."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A package whose public names are all empty classes."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Named(name, (nn.Module,), {})


class _Finder:
    """Find a replacement for every module of torchvision."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a replacement; None for modules outside torchvision."""
        if name.partition(".")[0] != NAME:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the replacement."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the replacement unchanged."""


@contextmanager
def stand_in() -> Iterator[None]:
    """Return a context in which torchvision can be imported even if it is not installed."""
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
