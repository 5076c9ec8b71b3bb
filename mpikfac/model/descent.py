"""The optimizer that follows K-FAC's directions, and a guard for optimizers that trainers step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpikfac.plan import check_size
from mpikfac.settings import in_force

LARGEST = 1e6  # a larger learning rate or weight decay is a mistake


class Descent(Optimizer):
    """Subtract `lr * (direction + weight_decay * weights)`; the gradients are the directions.

    Each group contains a momentum, because schedulers expect it there; the trainer applies it to
    gradients before it preconditions them.

    Args:
        params: parameters, or groups of parameters.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in numbers.items():
            below = 1.0 if name == "momentum" else LARGEST
            numbers[name] = in_force(name, check_size(name, value), 0, below)
        super().__init__(params, numbers)

    def momentum(self, step: int) -> float:
        """Return the momentum of the first parameter group, regardless of `step`."""
        return float(self.param_groups[0]["momentum"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if decay:
                torch._foreach_mul_(parameters, 1 - lr * decay)
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-lr)


class StepGuard:
    """Raise an error if anything but the trainer steps its optimizer.

    Every step is allowed after `remove`, or once the trainer no longer exists.
    """

    _stepping: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()  # in a trainer's step
    _allowed: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()  # may be stepped once

    def __init__(self, optimizer: Optimizer, trainer: object) -> None:
        self._optimizer, name = optimizer, type(trainer).__name__
        alive, guarded = weakref.ref(trainer), weakref.ref(optimizer)

        # A wrapper without hooks calls the hooks of the optimizer that it wraps, and passes itself.
        def check(*_: object) -> None:
            stepped = guarded()
            if stepped is None or alive() is None or stepped in self._stepping:
                return
            if stepped not in self._allowed:
                raise ValueError(
                    f"{name}.step() steps the optimizer itself, so another optimizer.step() "
                    f"would repeat the step; leave optimizer.step() out (with precondition(), the "
                    f"optimizer steps once after each call)"
                )
            self._allowed.discard(stepped)

        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # If a wrapper did not call super().__init__(), do what torch does after unpickling.
            vars(optimizer).setdefault("defaults", {})
            Optimizer.__setstate__(optimizer, {})
        self._hook = optimizer.register_step_pre_hook(check)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow steps inside the context."""
        self._stepping.add(self._optimizer)
        try:
            yield
        finally:
            self._stepping.discard(self._optimizer)

    def allow_once(self) -> None:
        """Allow a single step; the caller has already preconditioned the gradients."""
        self._allowed.add(self._optimizer)

    def remove(self) -> None:
        """Allow all later steps."""
        self._hook.remove()
