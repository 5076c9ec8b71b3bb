"""Measure a plan's collectives in isolation: with the messages of training, but no computation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from mpikfac.comm.grid import Grid
from mpikfac.plan import Message, RankPlan, names, step_messages

REPEATS = 5  # measurements per stage, after a warm-up
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def isolated_seconds(grid: Grid, plan: RankPlan, device: torch.device) -> dict[str, float]:
    """Return, by stage, the seconds that the messages of a step take in isolation.

    The messages are sent one after another, from scratch buffers, over the same communicators as in
    training. All ranks start together, and each time is the median of five repetitions. With
    `stagger`, a stage's medians are averaged over the slots of a refresh. Messages to and from
    curvature servers and parameter servers are not measured.

    Collective over: world.
    """
    times: defaultdict[str, list[float]] = defaultdict(list)
    apart = grid.apart()
    for turn in plan.turns[1:] or plan.turns:
        for stage, messages in _by_stage(step_messages(plan, True, True, turn=turn)).items():
            times[stage].append(_seconds(apart, plan, messages, device))
    return {stage: fmean(seconds) for stage, seconds in times.items()}


def _by_stage(messages: Sequence[Message]) -> dict[str, list[Message]]:
    stages: defaultdict[str, list[Message]] = defaultdict(list)
    for message in messages:
        if message.over != "curvature":
            stages[message.stage].append(message)
    return stages


def _seconds(
    grid: Grid, plan: RankPlan, messages: Sequence[Message], device: torch.device
) -> float:
    """Return the median time of a stage's messages, in seconds.

    Collective over: world.
    """
    numbers = _numbers(plan, messages, device)
    parts = numbers.clone().expand(plan.parts, -1)
    times = []
    for _ in range(1 + REPEATS):
        grid.world.Barrier()
        began = time.perf_counter()
        if messages[0].primitive == "Send, Bcast":
            grid.sum_in_order(parts, numbers, messages[0].stage)
        else:
            grid.exchange(messages, numbers)
        if not numbers.is_cpu:
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _numbers(plan: RankPlan, messages: Sequence[Message], device: torch.device) -> Tensor:
    """Return random values to send instead of the stage's arena, as many as its messages need."""
    sizes = plan.itemsizes
    size = sizes.bases if messages[0].stage == names.PUBLISH_BASES else sizes.numbers
    last = max(stop for message in messages for _, stop in message.spans)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(last, generator=generator, device="cpu")
    return numbers.to(device, DTYPES[size])
