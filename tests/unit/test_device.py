from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

import mpikfac
from mpikfac.comm import job
from mpikfac.comm.job import cuda_aware


@pytest.fixture
def no_gpu(monkeypatch):
    """Return monkeypatch, on a machine without a GPU for torch."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.delenv("MPIKFAC_CUDA_AWARE", raising=False)
    return monkeypatch


@pytest.fixture
def two_gpus(monkeypatch):
    """Return the chosen GPUs, on a machine with two GPUs for torch."""
    chosen = []
    found = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize("kind", ["auto", "cpu"])
def test_without_a_gpu_there_is_the_cpu(comm, no_gpu, kind):
    assert mpikfac.device(comm, kind) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_refused(comm, no_gpu):
    with pytest.raises(ValueError, match="device='cuda', but torch finds no GPU; use device='cpu'"):
        mpikfac.device(comm, "cuda")


@pytest.mark.parametrize(
    ("kind", "where"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cpu", "cpu")]
)
def test_the_first_rank_of_a_node_takes_the_first_gpu(comm, two_gpus, kind, where):
    """Oracle: the local rank; torch's current device is set too."""
    assert mpikfac.device(comm, kind) == torch.device(where)
    assert two_gpus == ([] if where == "cpu" else [0])


def test_gpus_of_another_name_are_refused(comm, two_gpus):
    with pytest.raises(ValueError, match="device='xpu', but torch finds a GPU of type 'cuda'"):
        mpikfac.device(comm, "xpu")


def test_the_communicator_of_the_node_is_freed(no_gpu):
    """Oracle: the calls of MPI."""
    freed = []
    node = SimpleNamespace(rank=0, Free=lambda: freed.append(True))
    mpikfac.device(SimpleNamespace(Split_type=lambda kind: node))
    assert freed == [True]


@pytest.mark.parametrize(("override", "answer"), [("1", True), ("0", False), (None, False)])
def test_the_user_knows_better_whether_mpi_takes_device_buffers(no_gpu, override, answer):
    """Oracle: the override; without an override, no GPU means no."""
    if override is not None:
        no_gpu.setenv("MPIKFAC_CUDA_AWARE", override)
    assert cuda_aware() is answer


@pytest.mark.parametrize("maker", [job.NVIDIA, job.AMD, job.INTEL])
@pytest.mark.parametrize("answer", [0, 1])
def test_mpi_is_asked_for_the_makers_gpus(monkeypatch, maker, answer):
    """Oracle: a library that knows one function of the maker, and says yes to all other makers."""
    others = {
        q: lambda: 1 for m in (job.NVIDIA, job.AMD, job.INTEL) if m != maker for q in m.queries
    }
    library = SimpleNamespace(**others, **{maker.queries[-1]: lambda: answer})
    found = torch.device(maker.kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.delenv("MPIKFAC_CUDA_AWARE", raising=False)
    monkeypatch.setattr(job, "MAKERS", (maker,))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    assert cuda_aware() == bool(answer)


def test_a_gpu_of_an_unknown_maker_is_not_used(comm, monkeypatch):
    """Oracle: the CPU."""
    found = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    assert mpikfac.device(comm) == torch.device("cpu")
