"""Unscale the gradients of a scaled loss, and skip the same steps on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine.gradients import Gradients
from mpikfac.layers import SKIP, Votes
from mpikfac.numerics import Scaler, all_finite, end_step, is_unscaled


def usable_scaler(gradients: Gradients, scaler: Scaler, optimizer: Optimizer) -> Scaler | None:
    """Return the scaler if a step can use it, or None if it is disabled.

    Raises:
        ValueError: gradients are already unscaled, or sent before they can be unscaled.
    """
    if not hasattr(scaler, "is_enabled"):
        raise ValueError(f"step() accepts a GradScaler or None, not {type(scaler).__name__}")
    if not scaler.is_enabled():
        return None
    if is_unscaled(scaler, optimizer):
        raise ValueError(
            "step(scaler) unscales gradients, which scaler.unscale_ has already done; leave out "
            "scaler.unscale_, and clip with step(max_norm=...)"
        )
    if gradients.plan.sharding:
        raise ValueError(
            "fully_shard averages gradients before they can be unscaled; train with "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), which "
            "needs no scaler"
        )
    if gradients.plan.strategy.transport.overlap:
        raise ValueError(
            "with transport.overlap=True gradients are sent before they can be unscaled; "
            "step(scaler) needs transport.overlap=False"
        )
    return scaler


def average_scaled(gradients: Gradients, scaler: Scaler, finite: bool) -> bool:
    """Average gradients of a scaled loss; return whether the gradients of all ranks are finite.

    A rank whose gradients contain NaN or infinity, or for which `finite` is False, sends only NaN,
    which every rank that receives a part of the sum detects; ranks that receive no part are
    notified. The scaler gets the same result on all ranks, or one result per rank if ranks update
    replicas of the model.

    Collective over: as in `Gradients.average`; also world if a rank updates no parameters.
    """
    arena, accumulated, scale = gradients.arena, gradients.sender.accumulated, scaler.get_scale()
    for block in gradients.blocks:
        if block.parameters:
            accumulated[..., arena.span(block.name)] /= scale
    if not (finite and all_finite(accumulated)):
        _spoil(gradients, accumulated)
    gradients.average()
    plan = gradients.plan
    stepped = arena.segment(plan.rank) if plan.owner_updates else arena.flat
    usable = bool(stepped.isfinite().all())
    if plan.owner_updates and 0 in arena.layout.counts():
        usable = summed(gradients.site.grid.world, [not usable]) == [0]
    end_step(scaler, usable, arena.flat.device)
    return usable


def _spoil(gradients: Gradients, accumulated: Tensor) -> None:
    """Before values are sent, replace them with NaN; of the votes, replace only `SKIP`."""
    for block in gradients.blocks:
        values = accumulated[..., gradients.arena.span(block.name)]
        (values[..., SKIP] if isinstance(block, Votes) else values).fill_(torch.nan)
