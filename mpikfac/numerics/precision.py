"""Mixed precision: what `torch.autocast` and `torch.amp.GradScaler` ask of the library."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, computing in the dtypes of its tensors even where it is called under autocast."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return called


def end_step(scaler: GradScaler, finite: bool, device: torch.device) -> None:
    """Tells `scaler` whether a step was taken: it reduces its scale, or lets it grow in time.

    All that it asks for is an optimizer with gradients that are finite or not.
    """
    number = torch.zeros(1, device=device, requires_grad=True)
    number.grad = torch.full_like(number, 0.0 if finite else torch.nan)
    scaler.unscale_(torch.optim.SGD([number]))
    scaler.update()
