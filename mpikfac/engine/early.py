"""Gradients that are sent as soon as the backward pass has made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from mpikfac.comm import Overlapped, Sender
from mpikfac.engine.slots import Slot
from mpikfac.layers import Hook
from mpikfac.numerics import copy_all


class Reader:
    """Copy gradients into the arena when the step asks."""

    def __init__(self, slots: Iterable[Slot], sender: Sender) -> None:
        self.slots, self.sender = list(slots), sender

    def read(self) -> None:
        """Copy the gradients of all blocks into the arena.

        Raises:
            ValueError: a gradient was changed after the gradient was sent.
        """
        copy_all(one for s in self.slots for one in s.block.gradients_to(s.parts))

    def forget(self) -> None:
        """Forget which gradients were sent."""

    def detach(self) -> None:
        """Remove the hooks."""


class EarlyReader(Reader):
    """Copy and send a gradient in the backward pass; a step reads only what the pass has left."""

    def __init__(self, slots: Iterable[Slot], sender: Sender) -> None:
        super().__init__(slots, sender)
        # Gradients that were sent, and their versions, by the parameter's id.
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(hook)
            for slot in self.slots
            for hook in [Hook(self._on_gradient, slot, [])]
            for parameter in slot.block.parameters
        ]

    def read(self) -> None:
        """Send the gradients that no backward pass has made, and check the others."""
        sender = cast(Overlapped, self.sender)
        for slot in self.slots:
            if sender.is_ready(slot.block.name):
                self._check_unchanged(slot)
            else:
                self._send(slot)
        self._sent.clear()

    def forget(self) -> None:
        """Forget which gradients were sent."""
        self._sent.clear()

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, slot: Slot, made: list[Tensor], parameter: Tensor) -> None:
        made.append(parameter)
        if len(made) == len(slot.block.parameters):
            made.clear()
            with torch.no_grad():
                self._send(slot)

    def _send(self, slot: Slot) -> None:
        copy_all(slot.block.gradients_to(slot.parts))
        for parameter in slot.block.parameters:
            self._sent[id(parameter)] = parameter.grad, _version(parameter.grad)
        self.sender.ready(slot.block.name)

    def _check_unchanged(self, slot: Slot) -> None:
        for parameter in slot.block.parameters:
            if id(parameter) not in self._sent:
                continue
            gradient, version = self._sent[id(parameter)]
            if parameter.grad is not gradient or _version(gradient) != version:
                raise ValueError(
                    f"the gradient of {slot.block.name!r} was changed after the backward pass; "
                    f"with overlap=True the gradient was sent before: clip by step(max_norm=...)"
                )


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


READERS = {False: Reader, True: EarlyReader}
"""Readers, by whether the sender is early."""
