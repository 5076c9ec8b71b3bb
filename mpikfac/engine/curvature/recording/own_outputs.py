"""Call hooks with the outputs of modules before hooks of the program can replace or change them.

Torch calls global hooks before a module's own hooks, and a program can register a module's hook to
be called first. If the program has no global hook, no global hook is registered here.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as of_torch
from torch.utils.hooks import RemovableHandle

from mpikfac.layers import Hook, Layer


class OwnOutputs:
    """Forward hooks of layers that are called before all hooks of the program."""

    def __init__(self) -> None:
        # Hooks are not stored here: they refer to the model, which would then outlive its trainer.
        self._handles: list[RemovableHandle] = []
        self._global: RemovableHandle | None = None  # calls the hooks in place of the modules

    def attach(self, layer: Layer, hook: Hook) -> None:
        """Call `hook` after each forward call of a module of the layer."""
        for module in layer.modules:
            self._handles += layer.attach(module, Hook(self._on_module, ref(self), hook))

    def come_first(self) -> None:
        """From now on, call these hooks before all other hooks of the program."""
        if self._global is None and of_torch._global_forward_hooks:
            self._global = of_torch.register_module_forward_hook(self._on_any, with_kwargs=True)
            self._handles.append(self._global)
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            if handle.id in hooks and next(iter(hooks)) != handle.id:
                hooks.move_to_end(handle.id, last=False)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._global = None

    @staticmethod
    def _on_module(own: ref[OwnOutputs], hook: Hook, *called: Any) -> None:
        self = own()
        if self is not None and self._global is None:
            hook(*called)

    def _on_any(self, module: nn.Module, *called: Any) -> None:
        for hook in list(module._forward_hooks.values()):
            if isinstance(hook, Hook) and hook.args[:1] == (ref(self),):
                hook.args[1](module, *called)
