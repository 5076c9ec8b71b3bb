"""Running averages over batches, weighed by numbers of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpikfac.engine.nonfinite import Flags
from mpikfac.numerics import all_finite, copy_all, each_finite


@dataclass(frozen=True)
class Running:
    """A running average, and a batch's sum beside the average; all are views of arenas.

    Attributes:
        total: the batch's sum over examples.
        count: `[1]`, the number of examples in the sum.
        weight: `[1]`, the number of examples in the average.
    """

    name: str
    total: Tensor
    count: Tensor
    average: Tensor
    weight: Tensor


def merge(running: Sequence[Running], decay: float) -> None:
    """Take the batch's sums into the averages, weighed by the numbers of examples.

    A sum becomes the batch's mean. With a count of 0, the average does not change.
    """
    if not running:
        return
    counts = torch.cat([each.count for each in running])
    weights = decay * torch.cat([each.weight for each in running]) + (1 - decay) * counts
    copy_all(zip([each.weight for each in running], weights.split(1)))
    shares = torch.where(counts > 0, (1 - decay) * counts / weights, 0).split(1)
    divisors = torch.where(counts > 0, counts, 1).split(1)
    for each, divisor, share in zip(running, divisors, shares):
        mean = each.total.div_(divisor)
        precise = each.average.to(mean.dtype)  # the average itself if dtypes are the same
        each.average.copy_(precise.lerp_(mean, share))


def leave_out_broken(
    flat: Tensor, running: Sequence[Running], flags: Flags, report: Callable[[list[str]], None]
) -> None:
    """Set sums with NaN or infinity to 0, and their counts; `report` is called with the names.

    Args:
        flat: the buffer of all sums.
        flags: gives the names later, so that the host need not wait now.
    """
    if not running or (flat.is_cpu and all_finite(flat)):
        report([])
        return
    sound = each_finite([each.total for each in running])
    torch._foreach_mul_([each.count for each in running], list(sound.to(flat.dtype).split(1)))
    flat.nan_to_num_(0.0, 0.0, 0.0)
    names = [each.name for each in running]
    flags.keep(sound, lambda marks: report([n for n, mark in zip(names, marks) if not mark]))
