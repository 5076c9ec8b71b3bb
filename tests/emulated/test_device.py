"""The emulated device finds faults that a GPU would show now and then. Oracle: planted faults."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch import nn

if "emulated" not in sys.modules:
    pytest.skip("needs the emulated device: bash jobs/test.sh --device", allow_module_level=True)

CUDA = torch.device("cuda")


@pytest.fixture
def counting():
    """Return the numbers 0 to 9 on the device, written by a kernel that has not run yet."""
    counted = torch.zeros(10).to(CUDA)
    torch.accelerator.synchronize()
    return counted.add_(torch.arange(10, device=CUDA))


def numbers_of(tensor):
    """Return the numbers that MPI would send, were `tensor` given to MPI now."""
    return torch.from_dlpack(tensor.__dlpack__()).tolist()


def test_a_missing_wait_before_mpi_sends_older_numbers(counting):
    assert numbers_of(counting) == [0] * 10
    torch.accelerator.current_stream().synchronize()
    assert numbers_of(counting) == list(range(10))


def test_a_missing_wait_after_mpi_changes_what_a_kernel_reads(counting):
    """MPI receives into a buffer that an earlier kernel has still to read."""
    torch.accelerator.synchronize()
    doubled = counting * 2
    torch.from_dlpack(counting.__dlpack__()).fill_(7)
    assert doubled.tolist() == [14] * 10


def test_the_host_cannot_read_the_devices_memory(counting):
    """Oracle: the signal of a segmentation fault, in a process of its own."""
    text = "import ctypes, torch; ctypes.string_at(torch.zeros(9, device='cuda').data_ptr(), 4)"
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert ran.returncode == -11


def test_tensors_of_the_host_are_refused_beside_those_of_the_device(counting):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        counting + torch.ones(10)


def test_mpi_takes_no_tensor_with_gaps(counting):
    with pytest.raises(BufferError, match="not contiguous"):
        numbers_of(counting[::2])


def test_a_copy_that_nobody_waited_for_is_not_a_number(counting):
    host = counting.to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.tolist() == list(range(10))


def test_a_pinned_buffer_that_changes_too_early_changes_the_copy():
    host = torch.ones(10, pin_memory=True)
    copied = host.to(CUDA, non_blocking=True)
    host.fill_(5)
    assert copied.tolist() == [5] * 10
    host = torch.ones(10)  # memory that is not pinned is copied before the call returns
    copied = host.to(CUDA, non_blocking=True)
    host.fill_(5)
    assert copied.tolist() == [1] * 10


def test_streams_wait_for_one_another_only_if_told_to(counting):
    other = torch.Stream(CUDA)
    with other:
        early = counting + 0
    other.synchronize()
    assert early.tolist() == [0] * 10
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        late = counting + 0
    other.synchronize()
    assert late.tolist() == list(range(10))


def test_an_event_is_complete_once_its_stream_is_there(counting):
    event = torch.Event(CUDA)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query() and numbers_of(counting) == list(range(10))


def test_a_stream_without_work_reaches_an_event_at_once():
    """Oracle: the host's clock, between two events that nobody waits for."""
    torch.accelerator.synchronize()
    start, end = (torch.Event(CUDA, enable_timing=True) for _ in range(2))
    start.record()
    began = time.monotonic()
    time.sleep(0.02)
    slept = time.monotonic() - began
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 1e3 * slept


def test_too_little_memory_is_one_clear_error():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2**40, dtype=torch.uint8, device=CUDA)


def test_training_is_that_of_the_host():
    """Oracle: the same steps on the CPU."""

    def weights(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
        model = model.double().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            images = torch.randn(6, 2, 4, 4).double().to(device)
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()

    torch.testing.assert_close(weights(CUDA), weights("cpu"), rtol=1e-10, atol=1e-12)
