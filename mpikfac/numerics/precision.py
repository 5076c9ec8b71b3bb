"""Support mixed precision: `torch.autocast` and `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` to compute in the tensors' dtypes, even if called under autocast."""
    gpu = str(torch.accelerator.current_accelerator() or "cpu")

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast(gpu, enabled=False):
            return function(*args, **kwargs)

    return called


class PassedScale:
    """A scale that a GradScaler passes to an optimizer; only the scaler itself changes it."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def is_enabled(self) -> bool:
        """Return True, because a disabled scaler does not pass a scale."""
        return True

    def get_scale(self) -> float:
        """Return the scale."""
        return self._scale


Scaler: TypeAlias = GradScaler | PassedScale


def is_unscaled(scaler: Scaler, optimizer: Optimizer) -> bool:
    """Return whether `scaler.unscale_(optimizer)` has been called since the last scale update."""
    states: Any = getattr(scaler, "_per_optimizer_states", {})  # torch has no public interface
    stage = states.get(id(optimizer), {}).get("stage")
    return getattr(stage, "name", "") == "UNSCALED"


def end_step(scaler: Scaler, finite: bool, device: torch.device) -> None:
    """Inform a scaler whether a step was taken, so that it reduces or eventually raises its scale.

    A scaler only checks whether an optimizer's gradients are finite, so a single value stands in
    for the model's gradients. A `PassedScale` belongs to a scaler that has already checked the
    local gradients.
    """
    if isinstance(scaler, PassedScale):
        return
    number = torch.zeros(1, device=device, requires_grad=True)
    number.grad = torch.full_like(number, 0.0 if finite else torch.nan)
    scaler.scale(number.detach())  # initialises the scale on a rank that has had no loss so far
    scaler.unscale_(torch.optim.SGD([number]))
    scaler.update()
