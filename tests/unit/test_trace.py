from __future__ import annotations

import threading
import time

import pytest
import torch

import mpikfac


class FakeGpu:
    """A stream that runs a single queued item on demand; the stream's clock counts milliseconds."""

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
        assert enable_timing  # events without timing have no time
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
    monkeypatch.setattr("mpikfac.trace._on_device", lambda: True)
    monkeypatch.setattr(torch, "Event", gpu.event)
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
    """Oracle: a stream with known times; the host waits for the stream only to read `seconds`."""
    trace = mpikfac.Trace()
    gpu.launch(500.0)  # earlier work on the stream does not count for the stage
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


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no GPU")
def test_a_stage_that_only_launches_takes_the_gpus_time():
    """Oracle: the host's clock over the same work, between two synchronisations."""
    trace, matrix = mpikfac.Trace(), torch.randn(4096, 4096, device="cuda")
    matrix @ matrix  # loads the kernels of the first product
    torch.accelerator.synchronize()
    start = time.perf_counter()
    with trace.stage("decompose"):
        for _ in range(50):
            matrix @ matrix
    torch.accelerator.synchronize()
    elapsed = time.perf_counter() - start
    assert elapsed / 2 < trace.seconds["decompose"] <= elapsed


def test_communication_is_the_stages_that_communicate():
    """Oracle: the sum by hand."""
    trace = mpikfac.Trace()
    trace.seconds.update(dict.fromkeys([*mpikfac.trace.COMMUNICATION, "decompose"], 2.0))
    assert trace.communication_seconds() == 2.0 * len(mpikfac.trace.COMMUNICATION)


def test_clear_forgets():
    trace = mpikfac.Trace()
    trace.record(True)
    with trace.stage("clip", "world", 8):
        pass
    assert trace.sent == {"clip": 8}
    trace.clear()
    assert not trace.seconds and not trace.calls and not trace.sent and not trace.events


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


def test_events_are_kept_while_recording_is_on():
    """Oracle: the stages as written, in the order of the ends, within the clock's readings."""
    trace = mpikfac.Trace()
    with trace.stage("optimizer"):
        pass
    trace.record(True)
    before = time.perf_counter()
    with trace.stage("backward"), trace.stage("statistics"):
        pass
    with trace.stage("clip", "world", 8):
        pass
    after = time.perf_counter()
    trace.record(False)
    with trace.stage("optimizer"):
        pass
    kept = [(name, *rest) for name, _, _, *rest in trace.events]
    assert kept == [
        ("statistics", "", 0, 1, "", 0),
        ("backward", "", 0, 0, "", 0),
        ("clip", "world", 8, 0, "", 0),
    ]
    inner, outer, last = [(event.start, event.end) for event in trace.events]
    times = [before, outer[0], *inner, outer[1], *last, after]
    assert times == sorted(times)
    assert trace.calls["optimizer"] == 2


def test_a_thread_beside_the_training_nests_its_own_stages():
    """Oracle: every thread's nesting as written; `current` is the training's stage."""
    trace = mpikfac.Trace(events=True)
    inside, outside = threading.Event(), threading.Event()

    def work():
        with trace.stage("publish bases", "column", 8), trace.stage("copy"):
            inside.set()
            assert outside.wait(10)

    thread = threading.Thread(target=work, name="messages")
    with trace.stage("forward"):
        thread.start()
        assert inside.wait(10)
        assert trace.current == "forward"
    with trace.stage("backward"):
        outside.set()
        thread.join()
        assert trace.current == "backward"
    found = [(event.name, event.depth, event.thread) for event in trace.events]
    assert found == [
        ("forward", 0, ""),
        ("copy", 1, "messages"),
        ("publish bases", 0, "messages"),
        ("backward", 0, ""),
    ]
    assert trace.sent == {"publish bases": 8}


def test_stages_of_many_threads_all_count():
    """Oracle: threads times stages."""
    trace = mpikfac.Trace(events=True)

    def work():
        for _ in range(500):
            with trace.stage("copy", "world", 1):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trace.calls["copy"] == trace.sent["copy"] == len(trace.events) == 2000


def test_events_on_a_gpu_lie_where_its_stream_comes_to_them(gpu, monkeypatch):
    """Oracle: a stream with known times, and a host whose clock always shows 100 s."""
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    trace = mpikfac.Trace()
    trace.record(True)
    with trace.stage("backward"):
        gpu.launch(20.0)
        with trace.stage("statistics"):
            gpu.launch(5.0)
    gpu.launch(10.0)
    with trace.stage("clip", "world", 8):
        gpu.launch(2.0)
    trace.record(False)
    with trace.stage("optimizer"):
        gpu.launch(1.0)
    times = [(event.name, event.start - 100, event.end - 100) for event in trace.events]
    assert [name for name, _, _ in times] == ["statistics", "backward", "clip"]
    milliseconds = [1e3 * time for _, *both in times for time in both]
    assert milliseconds == pytest.approx([20, 25, 0, 25, 35, 37])
    assert trace.seconds["optimizer"] == pytest.approx(0.001)
