"""Copy gradients from the model to an arena, and directions back to the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mpikfac.comm import Sender
from mpikfac.engine.site import Site
from mpikfac.layers import Hook, Layer, Other
from mpikfac.numerics import Arena, Copies, copy_all

Block = Layer | Other


@dataclass(frozen=True)
class Slot:
    """A layer or an uncovered block, bound to a place in an arena.

    Attributes:
        parts: views of the arena, shaped like the block's parameters.
        steps: whether the rank's optimizer steps the block.
    """

    block: Block
    parts: Sequence[Tensor]
    steps: bool


def slots_in(arena: Arena, blocks: Iterable[Block], site: Site) -> list[Slot]:
    """Return slots for those `blocks` that have a place in the arena."""
    steps = site.plan.steps
    placed = (block for block in blocks if block.name in arena)
    return [Slot(b, b.parts(arena[b.name]), steps(b.name)) for b in placed]


class Reader:
    """Copy gradients into the arena when the step requests them, and directions to the model."""

    def __init__(self, slots: Iterable[Slot], sender: Sender) -> None:
        self.slots, self.sender = list(slots), sender

    @property
    def stepped(self) -> list[Tensor]:
        """The parameters that the rank's optimizer steps."""
        return [p for slot in self.slots if slot.steps for p in slot.block.parameters]

    def begin_step(self) -> None:
        """Prepare the model for a step."""

    def read(self) -> None:
        """Copy the gradients of all blocks into the arena.

        Raises:
            ValueError: a gradient was changed after it had been sent.
        """
        copy_all(pair for s in self.slots for pair in s.block.gradients_to(s.parts))

    def nonzero(self, layer: Layer) -> bool:
        """Return whether the rank's gradient of a layer, once read, has elements other than 0."""
        return bool(self.sender.arena[layer.name].any())

    def complete(self) -> None:
        """Complete the averages, after the sender's reductions.

        Collective over: world if the model is sharded, otherwise none.
        """

    def weights(self, layer: Layer) -> Sequence[Tensor]:
        """Return tensors whose norms are those of the layer's parameters."""
        return layer.parameters

    def write(self, slot: Slot) -> Copies:
        """Return the copies from an arena to the gradients of a block."""
        return slot.block.gradients_from(slot.parts)

    def publish(self) -> None:
        """Send the written directions to the ranks whose optimizers use them.

        Collective over: world if the model is sharded, otherwise none.
        """

    def abort_batch(self) -> None:
        """Forget which gradients have been sent."""

    def detach(self) -> None:
        """Remove the hooks."""


class EarlyReader(Reader):
    """Copy and send gradients during the backward pass; a step only reads the remaining ones."""

    def __init__(self, slots: Iterable[Slot], sender: Sender) -> None:
        super().__init__(slots, sender)
        self._made: Counter[str] = Counter()  # how many gradients the pass has computed, by block
        # Gradients that have been sent, and their versions, by the parameter's id.
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        own = ref(self)  # a model can outlive the trainer
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(hook)
            for slot in self.slots
            for hook in [Hook(self._on_gradient, own, slot)]
            for parameter in slot.block.parameters
        ]
        finalize(self, remove, self._hooks)

    def read(self) -> None:
        """Send the blocks not sent yet, and check that gradients already sent have not changed."""
        for slot in self.slots:
            if self.sender.is_ready(slot.block.name):
                self._check_unchanged(slot)
            else:
                self._send(slot)
        self._begin_batch()

    def abort_batch(self) -> None:
        """Forget which gradients have been computed and sent."""
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._sent.clear()
        self._made.clear()

    def detach(self) -> None:
        """Remove the hooks."""
        remove(self._hooks)

    @staticmethod
    def _on_gradient(own: ref[EarlyReader], slot: Slot, _: Tensor) -> None:
        self, name = own(), slot.block.name
        if self is None:
            return
        self._made[name] += 1
        if self._made[name] == len(slot.block.parameters):
            del self._made[name]
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
                    f"with overlap=True, it had already been sent: clip with step(max_norm=...)"
                )


def remove(hooks: Iterable[RemovableHandle]) -> None:
    """Remove hooks."""
    for hook in hooks:
        hook.remove()


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version
