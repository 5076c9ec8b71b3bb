"""Keep the outputs of modules before a global forward hook of the program can replace them.

Torch calls global hooks before a module's own hooks. If the program has no global hook, nothing is
registered here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.nn.modules import module as of_torch
from torch.utils.hooks import RemovableHandle


class OwnOutputs:
    """The outputs of some modules in calls that are still running."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = WeakSet(modules)
        self._outputs: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    def come_first(self) -> None:
        """Keep outputs from now on, before all other global hooks, if there are any."""
        hooks: Any = of_torch._global_forward_hooks
        if self._handle is None and hooks:
            self._handle = of_torch.register_module_forward_hook(self._keep)
            hooks.move_to_end(self._handle.id, last=False)

    def take(self, module: nn.Module, output: Any) -> Any:
        """Return a module's own output of the current call, or `output` if none was kept."""
        return self._outputs.pop(module, output)

    def remove(self) -> None:
        """Stop keeping outputs."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._outputs.clear()

    def _keep(self, module: nn.Module, _: Any, output: Any) -> None:
        if module in self._modules:
            self._outputs[module] = output
