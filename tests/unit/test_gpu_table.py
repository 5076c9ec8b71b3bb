"""The program that measures a GPU: its parts, how a part ends, and the table of the results."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    """Return the program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("TRIAL", "1")
    import gpu

    return gpu


def written(file: Path, rows: list[dict], trial: bool = False) -> Path:
    """Return the file of a result with such rows."""
    environment = {
        "device": "NVIDIA X",
        "started": "2026-11-27T10:00:00+00:00",
        "commit": "0123456789abcdef",
        "packages": {"torch": "2.13.0"},
    }
    file.write_text(json.dumps({"trial": trial, "environment": environment, "rows": rows}))
    return file


def test_the_table_is_drawn_from_stored_numbers(gpu, tmp_path):
    """Oracle: by hand. Ratios are of rounds: 4 / 2, 9 / 3 and 5 / 4; their median is 2."""
    sgd = {"name": "SGD", "base": "SGD", "wall_ms": [2.0, 3.0, 4.0]}
    rows = [
        sgd | {"device_ms": 1.25, "kernels": 176, "waits": 0, "memory_mb": 1234.5},
        {"name": "K-FAC", "base": "SGD", "wall_ms": [4.0, 9.0, 5.0], "device_ms": None},
        {"name": "captured", "base": "SGD", "missing": "KFAC has no argument 'capture'"},
        {"name": "ranks", "base": "other", "wall_ms": [1.0], "stages_ms": {"clip": 0.5, "x": 2.0}},
        {"name": "graphs", "note": "1, 0"},
    ]
    files = [written(tmp_path / "ordinary.json", rows), tmp_path / "absent.json"]
    assert gpu.table(files) == [
        "",
        "**ordinary**: NVIDIA X, 2026-11-27, torch 2.13.0, 0123456",
        "",
        "| case | ms of a step | over the base | device ms | kernels | waits | MB |",
        "|---|---|---|---|---|---|---|",
        "| SGD | 3.00 (2.00 to 4.00) |  | 1.25 | 176 | 0 | 1234 |",
        "| K-FAC | 5.00 (4.00 to 9.00) | 2.000 (1.250 to 3.000) |  |  |  |  |",
        "| captured | KFAC has no argument 'capture' | | | | | |",
        "| ranks | 1.00 (1.00 to 1.00) |  |  |  |  |  |",
        "| its stages | clip 0.50, x 2.00 | | | | | |",
        "| graphs | 1, 0 | | | | | |",
    ]


def test_figures_of_a_trial_are_named_so(gpu, tmp_path):
    """Oracle: the line above the table."""
    lines = gpu.table([written(tmp_path / "ordinary.json", [], trial=True)])
    assert lines[1].startswith("**ordinary**: TRIAL, figures mean nothing; NVIDIA X")


def test_all_parts_fit_into_the_minutes_of_a_machine(gpu):
    """Oracle: 800 seconds for all parts, and less than 100 for a part."""
    assert sum(part.seconds for part in gpu.PARTS) <= 800
    assert max(part.seconds for part in gpu.PARTS) < 100


@pytest.mark.gate
def test_a_part_without_a_result_ends_with_a_line_and_others_go_on(
    gpu, tmp_path, monkeypatch, capsys
):
    """Oracle: the lines, one for each way to end; a result of a trial counts in trials alone."""
    monkeypatch.setattr(gpu, "SLOW", 1)
    parts = [
        gpu.Part("broken", 60, "no_such_function"),
        gpu.Part("hanging", 0.01, "ordinary"),
        gpu.Part("older", 60, "ordinary", checkout=None),
        gpu.Part("finished", 60, "ordinary"),
        gpu.Part("unfit", 60, "no_such_function"),
    ]
    finished = written(tmp_path / "finished.json", [], trial=True)
    written(tmp_path / "unfit.json", [], trial=False)
    before = finished.stat().st_mtime_ns
    assert gpu.measure(parts, tmp_path)
    broken, hanging, older, skipped, unfit = capsys.readouterr().out.splitlines()
    assert broken.startswith("broken: failed after ") and str(tmp_path / "broken.txt") in broken
    assert hanging == "hanging: passed its limit of 0.01 s"
    assert older == "older: left out: BASE names no older checkout"
    assert skipped == "finished: has a result"
    assert unfit.startswith("unfit: failed after ")
    assert finished.stat().st_mtime_ns == before
    assert {file.name for file in tmp_path.glob("*.json")} == {"finished.json", "unfit.json"}


def test_time_is_counted_once_where_kernels_overlap(gpu):
    """Oracle: by hand: 0 to 3, 4 to 5, and 4.5 to 7."""
    from timing import busy

    assert busy([(4.5, 7), (0, 3), (1, 2), (4, 5)]) == 6


def test_calls_of_the_driver_are_told_apart(gpu):
    """Oracle: the names of CUDA's and ROCm's functions."""
    from timing import calls

    names = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaGraphLaunch": 1, "aten::mm": 9}
    names |= {"hipMemcpyAsync": 3, "cudaMemsetAsync": 1, "cudaStreamSynchronize": 2}
    assert calls(Counter(names)) == {"kernels": 8, "copies": 4, "waits": 2}


def test_the_device_s_time_is_that_of_kernels_and_copies(gpu, monkeypatch):
    """Oracle: by hand: kernels from 0 to 3 and 5 to 6 ms; the range of the optimizer is no work.

    The wait is the profiler's own: a step that does nothing waits as often.
    """
    import timing

    def event(name, start, end, device, annotation=False):
        span = SimpleNamespace(start=1e3 * start, end=1e3 * end)
        return SimpleNamespace(
            name=name, time_range=span, device_type=device, is_user_annotation=annotation
        )

    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    waits = [event("cudaDeviceSynchronize", 7, 8, cpu)]
    events = [
        *(event("gemm", 0, 2, cuda), event("sum", 1, 3, cuda), event("gemm", 5, 6, cuda)),
        event("Optimizer.step", 0, 9, cuda, annotation=True),
        *(event("cudaLaunchKernel", start, start + 1, cpu) for start in range(3)),
        *waits,
    ]
    passes = iter([events, waits])
    profile = SimpleNamespace(events=lambda: next(passes))
    monkeypatch.setattr(timing, "profile", lambda: nullcontext(profile))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.delitem(sys.modules, "emulated", raising=False)
    timing._calls_of_profiler.cache_clear()
    assert timing.counted(lambda: None) == {
        **{"device_ms": 4.0, "kernels": 3, "copies": 0, "waits": 0},
        "longest_ms": {"gemm": 3.0, "sum": 2.0},
    }


def test_a_profile_without_the_device_gives_no_time(gpu, monkeypatch):
    """Oracle: torch's own profiler, on the CPU alone."""
    import timing

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.delitem(sys.modules, "emulated", raising=False)
    found = timing.counted(lambda: torch.ones(3).sum())
    assert found == {**dict.fromkeys(timing.COUNTS, 0), "device_ms": None, "longest_ms": {}}
