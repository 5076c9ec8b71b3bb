"""Measure what two checks add to a step: noted gradients, and comparisons of weights.

    OMP_NUM_THREADS=1 python benchmarks/safeguards.py

On one rank, in CPU time of the process; medians over rounds, in brackets minimum and maximum. Noted
gradients (a pass whose gradients are thrown away does not count) cost time only in steps with new
factors, of which this is the fraction. Ranks compare checksums of all weights every 100 steps and,
with `shard_optimizer`, a few elements of each weight in every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac.model import Writes, checksums
from support import inside

WARM = 4  # steps in which gradients are also compared with calls


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Return a network of wide layers, and a batch."""
    sizes = [784, 1024, 1024]
    layers = [x for pair in zip(sizes, sizes[1:]) for x in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(128, 784)


def deep() -> tuple[nn.Module, torch.Tensor]:
    """Return a network of many small convolutions, and a batch."""
    layers: list[nn.Module] = []
    for inputs in (3, *(32 for _ in range(18))):
        layers += [nn.Conv2d(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*layers, *head), torch.randn(32, 3, 16, 16)


def seconds(work: Callable[[], object], count: int) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began) / count


def step_of(
    trainer: mpikfac.KFAC | mpikfac.FirstOrderTrainer, inputs: torch.Tensor
) -> Callable[[], None]:
    """Return a step on the batch."""
    labels = torch.arange(len(inputs)) % 10

    def step() -> None:
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(inputs), labels).backward()
        trainer.step()

    return step


def noting(step: Callable[[], None], count: int) -> float:
    """Return the fraction of steps in which gradients are noted and looked at."""
    spent = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: object) -> object:
            began = time.process_time()
            result = method(*arguments)
            spent.append(time.process_time() - began)
            return result

        return wrapped

    parts = {name: timed(getattr(inside.RetainedGradients, name)) for name in ("note", "removed")}
    with mock.patch.multiple(inside.RetainedGradients, **parts):
        total = count * seconds(step, count)
    return sum(spent) / total


def measure(name: str, model: nn.Module, inputs: torch.Tensor, rounds: int, steps: int) -> None:
    """Print both costs for a network."""
    rates = (torch.optim.SGD(model.parameters(), lr=1e-3) for _ in range(2))
    first = step_of(mpikfac.FirstOrderTrainer(model, next(rates)), inputs)
    of_first = statistics.median(seconds(first, steps) for _ in range(rounds))
    kfac = mpikfac.KFAC(model, next(rates), factor_update_steps=1, inv_update_steps=1000)
    step = step_of(kfac, inputs)
    seconds(step, WARM)
    of_step = statistics.median(seconds(step, steps) for _ in range(rounds))
    noted = [noting(step, steps) for _ in range(rounds)]
    print(f"{name}: {1e3 * of_step:.1f} ms with new factors, {1e3 * of_first:.1f} ms first-order")
    middle = statistics.median(noted)
    print(f"  noted gradients: {middle:.3%} ({min(noted):.3%} to {max(noted):.3%})")
    writes = Writes(dict(model.named_parameters()))
    checks = {
        "checksums": (lambda: checksums(model), inside.COMPARE_EVERY),
        "elements": (lambda: (writes.look(0), writes.note()), 1),
    }
    for check, (work, every) in checks.items():
        taken = statistics.median(seconds(work, steps) for _ in range(rounds))
        shares = f"{taken / every / of_step:.4%}; first-order {taken / every / of_first:.4%}"
        print(f"  {check}, {1e3 * taken:.3f} ms: {shares}", flush=True)
    kfac.close()


def main() -> None:
    """Print both costs for two networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    options = parser.parse_args()
    torch.manual_seed(0)
    for make in (wide, deep):
        measure(make.__name__, *make(), options.rounds, options.steps)


if __name__ == "__main__":
    main()
