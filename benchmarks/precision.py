"""Measure the effect of float32, TF32 and bfloat16 on directions of K-FAC, on a CPU that rounds.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/precision.py --data DIR
    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/precision.py --made
    PYTHONPATH=tests OMP_NUM_THREADS=1 python benchmarks/precision.py --data DIR --train

ResNet-20 and vit_small learn CIFAR-10 for some steps of K-FAC by default. Gradients and
decompositions of one more batch are computed in float64, and rounded to float32; directions in each
precision are then compared with directions in float64. A row has the median and the minimum cosine
over the layers, and the layer of the minimum: of directions as preconditioned, and of directions
whose singular values are equal. The rows "another batch" are directions in float64 for the
gradients of a different batch. The rows of `--made` are matrices of a known rank.

`--train` trains both networks with the training program in each precision, with three seeds; all
other options are the program's defaults. Runs are kept in `results/precision_runs.json`, and are
not repeated, so several sessions or machines can share the work.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import SEEDS, by_epoch

import mpikfac
from mpikfac.numerics import multiplying, orthogonalised
from mpikfac.preconditioners import Held
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import table
from mpikfac_apps.training import batches
from mpikfac_apps.training.augmentation.moves import Augmentation
from mpikfac_apps.training.train import main as program
from support import inside

PRECISIONS = "float32", "tf32", "bfloat16"
DAMPINGS = 10.0, 0.1, 0.001  # relative; 10 is the default
RUNS = Path(__file__).parent / "results" / "precision_runs.json"
TASK = {
    **{"data.name": "cifar10", "data.augment": "true", "data.test_images": "5000"},
    **{"batch": "128", "threads": "1", "watchdog_timeout": "null", "checkpoint_minutes": "null"},
}
Directions = dict[str, Tensor]


def main() -> None:
    """Print a table for each network, or of made matrices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "vit_small"])
    parser.add_argument("--steps", type=int, default=78)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--made", action="store_true", help="matrices of a known rank alone")
    parser.add_argument("--train", action="store_true", help="train in each precision")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--images", default="2560")
    parser.add_argument("--epochs", default="4")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    options = parser.parse_args()
    if options.made:
        of_made()
        return
    if options.train:
        for run in itertools.product(SEEDS, options.networks, options.precisions):
            train(options, *run)
        compare(options)
        return
    for name in options.networks:
        of_network(name, options)


def of_made() -> None:
    """Print the cosines of orthogonal directions of random matrices."""
    rows = [("matrix", "rank", *PRECISIONS)]
    torch.manual_seed(0)
    for outputs, inputs, rank in ((64, 576, 64), (64, 576, 8), (64, 576, 1), (256, 256, 32)):
        matrix = torch.randn(outputs, rank).double() @ torch.randn(rank, inputs).double()
        rows.append((f"{outputs} x {inputs}", f"{rank}", *of_orthogonal(matrix)))
    scores = torch.softmax(torch.randn(128, 10), 1) - F.one_hot(torch.arange(128) % 10, 10)
    head = scores.double().T @ torch.randn(128, 64).double()
    rows.append(("softmax head, 10 x 64", "9", *of_orthogonal(head)))
    print("\n".join(table(rows)))


def of_orthogonal(matrix: Tensor) -> list[str]:
    """Return the cosine of the orthogonal direction in each precision."""
    (exact,), cells = orthogonalised([matrix]), []
    for precision in PRECISIONS:
        with multiplying(precision):
            cells.append(f"{cosine(orthogonalised([matrix.float()])[0], exact):.4f}")
    return cells


def of_network(name: str, options: argparse.Namespace) -> None:
    """Print the cosines of a network's directions."""
    drawn = examples(options.data, options.batch)
    model = trained(name, list(itertools.islice(drawn, options.steps))).double()
    rows = [(name, "damping", "precision", "preconditioned", "orthogonal")]
    batch, other = next(drawn), next(drawn)
    for preconditioner, damping in itertools.product(("inverse", "eigen"), DAMPINGS):
        gradients, kfac = state(model, batch, preconditioner, damping)
        exact = both(gradients, kfac, torch.float64)
        beside = both(state(model, other, preconditioner, damping)[0], kfac, torch.float64)
        cells = [shown(*pair) for pair in zip(beside, exact)]
        rows.append((preconditioner, f"{damping:g}", "another batch", *cells))
        for precision in PRECISIONS:
            with multiplying(precision):
                rounded = both(gradients, kfac, torch.float32)
            cells = [shown(*pair) for pair in zip(rounded, exact)]
            rows.append((preconditioner, f"{damping:g}", precision, *cells))
    print("\n".join(table(rows)), flush=True)


def examples(path: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of CIFAR-10 with their labels."""
    images = datasets.load("cifar10", path, 10_000)
    normalise = batches.Normalise(images.train_images, torch.device("cpu"))
    draw = batches.Batches(
        images.train_images, images.train_labels, size, seed=0, augment=Augmentation()
    )
    for step in itertools.count():
        epoch, place = divmod(step, 10_000 // size)
        x, labels = draw.get(epoch, place)
        yield normalise(x), labels


def trained(name: str, examples: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Return the network after a step of K-FAC with each batch."""
    torch.manual_seed(0)
    model = models.build(name, classes=10)
    optimizer = mpikfac.KFACOptimizer(model)
    for images, labels in examples:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.trainer.close()
    return model


def state(
    model: nn.Module, batch: tuple[Tensor, Tensor], preconditioner: str, damping: float
) -> tuple[Directions, mpikfac.KFAC]:
    """Return the gradients of a batch, and K-FAC with the batch's decompositions."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    relative = mpikfac.Damping(relative=damping)
    kfac = mpikfac.KFAC(
        model, optimizer, mpikfac.world(), damping=relative, preconditioner=preconditioner
    )
    F.cross_entropy(model(batch[0].double()), batch[1]).backward()
    kfac.step()
    return {name: inside.gradients(kfac)[name] for name in inside.held(kfac)}, kfac


def both(
    gradients: Directions, kfac: mpikfac.KFAC, dtype: torch.dtype
) -> tuple[Directions, Directions]:
    """Return directions as preconditioned, and with equal singular values, of rounded values."""
    plain = {
        name: preconditioner.direction(gradients[name].to(dtype), in_dtype(held, dtype))
        for name, (preconditioner, held) in inside.held(kfac).items()
    }
    matrices = [layer.name for layer in kfac.plan.layers if layer.maps_vectors]
    return plain, dict(zip(matrices, orthogonalised([plain[name] for name in matrices])))


def in_dtype(held: Held, dtype: torch.dtype) -> Held:
    """Return decompositions in a dtype."""
    a, g = ({k: [b.to(dtype) for b in side] for k, side in s.items()} for s in (held.a, held.g))
    rest = None if held.denominators is None else held.denominators.to(dtype)
    return Held(a, g, rest, damping=held.damping)


def shown(rounded: Directions, exact: Directions) -> str:
    """Return the median and the least cosine over the layers, and the layer of the least."""
    found = {name: cosine(rounded[name], exact[name]) for name in exact}
    least = min(found, key=found.__getitem__)
    return f"{statistics.median(found.values()):.5f}, {found[least]:.5f} ({least})"


def cosine(rounded: Tensor, exact: Tensor) -> float:
    """Return the cosine of two tensors, in float64."""
    return F.cosine_similarity(rounded.double().flatten(), exact.flatten(), dim=0).item()


# -- training --------------------------------------------------------------------------------------


def train(options: argparse.Namespace, seed: int, network: str, precision: str) -> None:
    """Keep the end of a run; train only if the run is unknown."""
    name = run_name(options, network, precision, seed)
    if name in known():
        return
    settings = {
        **TASK,
        **{"model": network, "kfac.matmul_precision": precision, "seed": f"{seed}"},
        **{"data.path": f"{options.data}", "data.train_images": options.images},
        **{"epochs": options.epochs, "eval_every": options.epochs, "run_dir": f"{options.out}"},
    }
    shutil.rmtree(options.out, ignore_errors=True)
    with contextlib.suppress(SystemExit):
        program([f"--{key}={value}" for key, value in settings.items()])
    metrics = options.out / "metrics.jsonl"
    rows = map(json.loads, metrics.read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    found = {"loss": losses[-1], "test_accuracy": by_epoch(metrics)[-1]["test_accuracy"]}
    print(name, found, flush=True)
    runs = known() | {name: found}  # read anew: another program may have added a run
    RUNS.write_text(json.dumps(runs, indent=1) + "\n")


def run_name(options: argparse.Namespace, network: str, precision: str, seed: int) -> str:
    """Return a run's name in the file of runs."""
    return f"{network}, {options.images} images, {options.epochs} epochs, {precision}, seed {seed}"


def known() -> dict[str, dict[str, float]]:
    """Return the ends of all finished runs."""
    return json.loads(RUNS.read_text()) if RUNS.exists() else {}


def compare(options: argparse.Namespace) -> None:
    """Print means and ranges over seeds, for each network and precision."""
    rows = [("network", "precision", "seeds", "test accuracy, %", "loss")]
    for network, precision in itertools.product(options.networks, PRECISIONS):
        names = [run_name(options, network, precision, seed) for seed in SEEDS]
        if runs := [known()[name] for name in names if name in known()]:
            accuracies = spread([100 * run["test_accuracy"] for run in runs])
            losses = spread([run["loss"] for run in runs])
            rows.append((network, precision, f"{len(runs)}", accuracies, losses))
    print("\n".join(table(rows)))


def spread(numbers: list[float]) -> str:
    """Return the mean and the range of numbers."""
    return f"{statistics.mean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


if __name__ == "__main__":
    main()
