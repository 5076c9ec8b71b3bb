"""Time the orthogonal directions of a network, and a forward and backward pass.

OMP_NUM_THREADS=1 python benchmarks/orthogonal.py resnet50 --size 224 --batch 32
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from mpikfac.layers import Coverage, covered_shapes
from mpikfac.numerics import orthogonalised
from mpikfac_apps.problems import models


def main() -> int:
    """Print medians in seconds, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network")
    parser.add_argument("--size", type=int, default=32, help="image height and width")
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    model = models.build(options.network, classes=10)
    shapes = [shape for shape in covered_shapes(model, Coverage())[0] if shape.maps_vectors]
    directions = [torch.randn(shape.gradient) for shape in shapes]
    images = torch.randn(options.batch, 3, options.size, options.size)
    model, images = (x.to(memory_format=torch.channels_last) for x in (model, images))
    found = median(lambda: orthogonalised(directions))
    passes = median(lambda: model(images).sum().backward())
    print(f"orthogonal {found:.4f} s, passes {passes:.3f} s, ratio {found / passes:.3f}")
    return 0


def median(call: Callable[[], object], repetitions: int = 5) -> float:
    """Return the median seconds of a call; the first call does not count."""
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
