from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac_apps.running.metrics import Meter, Speed

CPU = torch.device("cpu")


class Ranks:
    """A communicator of ranks that all hold the same value."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def allgather(self, value: object) -> list[object]:
        return [value] * self.size


def count(meter, seed, images=6):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(images, 4, generator=draw)
    labels = torch.randint(4, (images,), generator=draw)
    right = (scores.argmax(1) == labels).sum()
    meter.add(F.cross_entropy(scores, labels), right, images)
    return scores, labels


def test_loss_and_accuracy_are_those_of_the_joined_batches():
    """Oracle: cross entropy and accuracy of all images at once."""
    meter = Meter(Ranks(3), CPU)
    scores, labels = map(torch.cat, zip(*(count(meter, seed, 5 + seed) for seed in range(3))))
    loss, accuracy = meter.everything()
    assert loss == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-6)
    assert accuracy == pytest.approx((scores.argmax(1) == labels).double().mean().item())


def test_recent_loss_covers_what_came_since_it_was_last_asked_for():
    meter = Meter(Ranks(2), CPU)
    count(meter, 0)
    first = meter.recent()
    second = F.cross_entropy(*count(meter, 1)).item()
    assert meter.recent() == pytest.approx(second, rel=1e-6)
    whole, _ = meter.everything()
    assert whole == pytest.approx((first + second) / 2, rel=1e-6)
    third = F.cross_entropy(*count(meter, 2)).item()
    assert meter.recent() == pytest.approx(third, rel=1e-6)


def test_a_restored_meter_goes_on_as_if_nothing_had_happened():
    """Oracle: an uninterrupted meter."""
    through, before, after = (Meter(Ranks(1), CPU) for _ in range(3))
    for meter in (through, before):
        count(meter, 0)
        meter.recent()
        count(meter, 1)
    after.load(before.state()["run/counted"], before.state()["run/reported"])
    for meter in (through, after):
        count(meter, 2)
    assert after.recent() == pytest.approx(through.recent(), rel=1e-12)
    assert after.everything() == pytest.approx(through.everything(), rel=1e-12)


def test_only_one_rank_takes_over_what_all_have_counted():
    state = torch.tensor([3.0, 2.0, 4.0], dtype=torch.float64)
    meter = Meter(Ranks(1, rank=1), CPU)
    meter.load(state, torch.zeros(3, dtype=torch.float64))
    count(meter, 0, images=6)
    assert meter.state()["run/counted"][2] == 6


def test_rates_count_from_the_mark():
    trace = mpikfac.Trace()
    speed = Speed(trace)
    with speed.step(100):
        trace.seconds["reduce gradients"] += 50.0
    speed.seconds = 60.0
    speed.mark()
    for images in (50, 150):
        with speed.step(images):
            pass
    speed.seconds = 64.0
    trace.seconds["reduce gradients"] += 1.0
    trace.seconds["decompose"] += 1.0
    assert speed.rates() == (50.0, 0.25)
