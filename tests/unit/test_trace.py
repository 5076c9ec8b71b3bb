from __future__ import annotations

import time

import pytest
import torch

import mpikfac


class FakeGpu:
    """A stream that runs one queued item at a time, when told to; its clock counts milliseconds."""

    def __init__(self) -> None:
        self.clock, self.queue, self.waits = 0.0, [], 0

    def launch(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def run(self, items: int) -> None:
        for _ in range(items):
            item = self.queue.pop(0)
            if isinstance(item, float):
                self.clock += item
            else:
                item.time = self.clock

    def event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing  # events that do not ask for it have no time
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.time = gpu, None

    def record(self) -> None:
        self.gpu.queue.append(self)

    def query(self) -> bool:
        return self.time is not None

    def synchronize(self) -> None:
        self.gpu.waits += 1
        while self.time is None:
            self.gpu.run(1)

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_a_stage_adds_up_its_time_and_calls():
    """Oracle: the time slept."""
    trace = mpikfac.Trace()
    for _ in range(2):
        with trace.stage("decompose"):
            time.sleep(0.01)
    assert trace.calls["decompose"] == 2
    assert 0.02 <= trace.seconds["decompose"] < 1


def test_on_a_gpu_a_stage_is_what_its_stream_takes(gpu):
    """Oracle: a stream whose times are known; the host waits for it only when `seconds` is read."""
    trace = mpikfac.Trace()
    gpu.launch(500.0)  # what a stage finds on the stream is not its own
    for name, milliseconds in (("decompose", 30.0), ("clip", 2.0), ("decompose", 10.0)):
        with trace.stage(name):
            gpu.launch(milliseconds)
    assert trace.calls == {"decompose": 2, "clip": 1}
    assert gpu.clock == gpu.waits == 0
    assert trace.seconds == pytest.approx({"decompose": 0.04, "clip": 0.002})
    assert trace.communication_seconds() == pytest.approx(0.002)


def test_stages_that_the_gpu_is_done_with_are_not_kept(gpu):
    """Oracle: the events that a fake stream has not reached."""
    trace = mpikfac.Trace()
    for _ in range(3):
        with trace.stage("decompose"):
            gpu.launch(10.0)
    gpu.run(4)  # start, work and end of the first stage, start of the second
    with trace.stage("decompose"):
        pass
    assert len(trace._running) == 3
    assert gpu.waits == 0
    assert trace.seconds["decompose"] == pytest.approx(0.03)
    assert not trace._running


def test_clear_forgets_what_still_runs(gpu):
    trace = mpikfac.Trace()
    with trace.stage("decompose"):
        gpu.launch(10.0)
    trace.clear()
    assert not trace.seconds and not trace.calls
    assert gpu.waits == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_a_stage_that_only_launches_takes_the_gpus_time():
    """Oracle: the host's clock over the same work, between two synchronisations."""
    trace, matrix = mpikfac.Trace(), torch.randn(4096, 4096, device="cuda")
    matrix @ matrix  # loads what the first product needs
    torch.cuda.synchronize()
    start = time.perf_counter()
    with trace.stage("decompose"):
        for _ in range(50):
            matrix @ matrix
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    assert elapsed / 2 < trace.seconds["decompose"] <= elapsed


def test_communication_is_the_stages_that_communicate():
    """Oracle: the sum by hand."""
    trace = mpikfac.Trace()
    trace.seconds.update(dict.fromkeys([*mpikfac.COMMUNICATION, "decompose"], 2.0))
    assert trace.communication_seconds() == 2.0 * len(mpikfac.COMMUNICATION)


def test_clear_forgets():
    trace = mpikfac.Trace()
    with trace.stage("clip"):
        trace.sent["clip"] += 8
    trace.clear()
    assert not trace.seconds and not trace.calls and not trace.sent


def test_a_stage_that_fails_raises_what_failed():
    with pytest.raises(ZeroDivisionError), mpikfac.Trace().stage("decompose"):
        raise ZeroDivisionError


def test_current_is_the_innermost_stage():
    """Oracle: the nesting as written, left in order and by an error."""
    trace = mpikfac.Trace()
    assert trace.current == ""
    with trace.stage("publish bases"):
        with pytest.raises(ZeroDivisionError), trace.stage("decompose"):
            assert trace.current == "decompose"
            raise ZeroDivisionError
        assert trace.current == "publish bases"
    assert trace.current == ""
