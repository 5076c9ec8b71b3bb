"""Time two algorithms for the input factor of a depthwise convolution, and the layer's own passes.

OMP_NUM_THREADS=1 python benchmarks/depthwise.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from mpikfac.layers.convolution import moments
from mpikfac.layers.convolution.autocorrelation import by_correlation
from mpikfac.layers.convolution.window import Window

SHAPE = (64, 256, 16, 16)
REPEAT = 9


def seconds(work: Callable[[], object]) -> float:
    """Return the median of several times, after a call that does not count."""
    work()
    found = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def main() -> None:
    """Print milliseconds in both formats of images."""
    torch.set_num_threads(1)
    groups = SHAPE[1]
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    print(f"{list(SHAPE)}, 3x3, one thread; torch {torch.__version__}")
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(SHAPE).to(memory_format=layout).requires_grad_()
        module = nn.Conv2d(groups, groups, 3, padding=1, groups=groups).to(memory_format=layout)
        own = seconds(lambda: module(x).sum().backward())  # noqa: B023 (used at once)
        image = x.detach()
        fast = seconds(lambda: by_correlation(image, window, groups))  # noqa: B023
        slow = seconds(lambda: moments.by_patches(image, window, groups))  # noqa: B023
        print(
            f"{str(layout).removeprefix('torch.'):18s} autocorrelation {1e3 * fast:6.1f} ms, "
            f"patches {1e3 * slow:6.1f} ms, forward and backward {1e3 * own:6.1f} ms"
        )


if __name__ == "__main__":
    main()
