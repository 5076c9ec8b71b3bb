"""Compare factor steps on a GPU: statistics by copied patches, and by autocorrelations.

    OMP_NUM_THREADS=1 python benchmarks/patches.py resnet20 --batch 128 --size 32

Prints milliseconds of a step, medians of 7 on the clock of the host, and the milliseconds that the
GPU works, by torch's profiler: the difference is the time of the host alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch.profiler import profile

import mpikfac
from mpikfac.layers.convolution import moments
from mpikfac_apps.problems import models

NEVER = 10**9
Step = Callable[[], None]
BF16 = mpikfac.Estimator(statistics_dtype=torch.bfloat16)
WAYS = {
    "autocorrelations": (True, "highest", {}),
    "autocorrelations, TF32": (True, "high", {}),
    "patches": (False, "highest", {}),
    "patches, TF32": (False, "high", {}),
    "patches, bfloat16": (False, "highest", {"estimator": BF16}),
}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="pixels of a side of the images")
    options = parser.parse_args()
    for way, (correlates, precision, settings) in WAYS.items():
        torch.set_float32_matmul_precision(precision)
        with mock.patch.object(moments, "worth_correlating", return_value=correlates):
            step = factor_step(options, settings)
            whole, on_gpu = milliseconds(step), gpu_milliseconds(step)
        print(f"{options.model}, {way}: {whole:.1f} ms, the GPU works for {on_gpu:.1f} ms")


def factor_step(options: argparse.Namespace, settings: dict) -> Step:
    """Return a training step with new factors and old decompositions."""
    comm = mpikfac.world()
    device = mpikfac.device(comm)
    torch.manual_seed(0)
    model = models.build(options.model, classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    kfac = mpikfac.KFAC(
        model, optimizer, comm, factor_update_steps=1, inv_update_steps=NEVER, **settings
    )
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    labels = torch.randint(10, (options.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        kfac.step()
        torch.accelerator.synchronize()

    return step


def milliseconds(step: Step, warm: int = 3, repetitions: int = 7) -> float:
    """Return the median time of a step on the clock of the host."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def gpu_milliseconds(step: Step) -> float:
    """Return the summed time of the kernels of a step."""
    with profile() as profiler:
        step()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3


if __name__ == "__main__":
    main()
