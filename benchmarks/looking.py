"""Measure how long a step takes to check whether the model has changed.

PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/looking.py --model resnet50
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import mpikfac
from mpikfac_apps.problems import models
from support import inside


def main() -> None:
    """Print medians over repetitions, and the fraction of a step of SGD."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    network = models.network(options.model)
    model = models.build(options.model, network.classes, network.image[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mpikfac.FirstOrderTrainer(model, optimizer, mpikfac.world())
    images = torch.randn(options.batch, *network.image)
    looks, steps = [], []
    for _ in range(options.repetitions):
        start = time.perf_counter()
        inside.look(trainer)
        middle = time.perf_counter()
        model(images).square().mean().backward()
        trainer.step()
        steps.append(time.perf_counter() - middle)
        looks.append(middle - start)
    look, step = statistics.median(looks), statistics.median(steps)
    print(f"{options.model}, batch {options.batch}: torch {torch.__version__}")
    print(f"comparison {1e3 * look:.3f} ms, step of SGD {1e3 * step:.1f} ms: {look / step:.5f}")


if __name__ == "__main__":
    main()
