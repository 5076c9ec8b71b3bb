"""Predict K-FAC's step of ResNet-50 relative to SGD's on the published machines. No MPI, no GPU.

    python benchmarks/predicted.py

The machines' times of statistics come from published code, which copies patches and multiplies them
(im2col). The library sums products of shifted images (autocorrelations) where that is less work.
Both are counted in operations, on tensors without content; the published seconds are then scaled by
the ratio, as if both ran at the same rate.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mpikfac
from mpikfac.layers.convolution import moments
from mpikfac.layers.convolution.window import Window
from mpikfac_apps.lab.predict import simulate
from mpikfac_apps.lab.predict.options import SIMULATE
from mpikfac_apps.problems import models

STRATEGIES = ("comm-opt", "mem-opt", "deferred-sharded")
INTERVALS = ((10, 100), (1, 10))  # factor_update_steps, inv_update_steps
COLUMNS = [f"{way} {every}" for every in INTERVALS for way in STRATEGIES]


def main() -> None:
    """Print the operations, and a table of mean steps in units of SGD's step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,16,64")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    by_patches, today = operations(options.batch)
    print(f"statistics: {by_patches / 1e12:.2f} Tflop by patches, {today / 1e12:.2f} Tflop today\n")
    print(f"| machine | statistics | ranks | {' | '.join(COLUMNS)} |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    for name in mpikfac.predict.published_machines():
        for way, share in (("as published", 1.0), ("scaled", today / by_patches)):
            for ranks, cells in ratios(name, share, options).items():
                numbers = " | ".join(f"{cell:.2f}" for cell in cells)
                print(f"| {name} | {way} | {ranks} | {numbers} |")


def operations(batch: int) -> tuple[float, float]:
    """Return the operations of a batch's statistics of ResNet-50: by patches, and by the library.

    Sums of outputs, and of inputs of 1x1 convolutions and of the linear layer, are the same.
    """
    with torch.device("meta"):
        model = models.build("resnet50", classes=1000)
        images = torch.empty(batch, 3, 224, 224)
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda m, x, y: seen.append((m, x[0], y)))
    model(images)
    counts = [tuple(map(counted, ways(*call))) for call in seen]
    by_patches, today = map(sum, zip(*counts))
    return by_patches, today


def ways(module: nn.Module, x: Tensor, y: Tensor) -> Iterator[Callable[[], object]]:
    """Yield the statistics of a layer: by patches, and by the library."""
    if isinstance(module, nn.Linear):
        yield from [lambda: (x.mT @ x, y.mT @ y)] * 2
        return
    assert isinstance(module, nn.Conv2d)
    padding = [(size, size) for size in module.padding]
    window = Window(module.kernel_size, module.stride, padding, module.dilation)
    yield lambda: (moments.by_patches(x, window), moments.output_sum(y))
    yield lambda: (moments.input_sum(x, window, bias=False), moments.output_sum(y))


def counted(work: Callable[[], object]) -> int:
    """Return the operations of matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def ratios(name: str, share: float, options: argparse.Namespace) -> dict[int, list[float]]:
    """Return mean steps in units of SGD's step, by the number of ranks.

    Args:
        share: of the machine's published seconds of statistics.
    """
    machine = mpikfac.predict.load_machine(name)
    networks = [dataclasses.replace(n, statistics=n.statistics * share) for n in machine.networks]
    machine = dataclasses.replace(machine, networks=tuple(networks))
    found: dict[int, list[float]] = {}
    for factor_update_steps, inv_update_steps in INTERVALS:
        words = f"--machine {name} --model resnet50 --strategy sgd,{','.join(STRATEGIES)}"
        words += f" --ranks {options.ranks} --batch_per_rank {options.batch}"
        words += (
            f" --factor_update_steps {factor_update_steps} --inv_update_steps {inv_update_steps}"
        )
        asked = SIMULATE.read(words.split())
        rows = simulate.predictions(asked, machine)
        seconds = {(row["ranks"], row["strategy"]): row["mean"]["seconds"] for row in rows}
        for ranks in asked.ranks:
            over = [seconds[ranks, way] / seconds[ranks, "sgd"] for way in STRATEGIES]
            found.setdefault(ranks, []).extend(over)
    return found


if __name__ == "__main__":
    main()
