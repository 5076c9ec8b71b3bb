"""Compare groups that learn from each other's predictions with groups that train independently.

    mpirun -n 2 python -m mpi4py benchmarks/codistillation.py

Two groups learn handwritten digits, with 64 images per group and step, in different orders and from
different initial weights; with `--data halves`, each from a half of the training images. The
learning rate decays to 0 in 264 steps. Results on the test images are steps to 97 %, the final
accuracy, and churn: the fraction of test images whose predicted class differs between two trainings
with different seeds, and the mean absolute difference of the probabilities [Anil et al. 2018].
Results are kept in `results/codistillation.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import combinations, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mpikfac
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import table
from mpikfac_apps.training.batches import Batches, Normalise, mixed

RESULTS = Path(__file__).parent / "results" / "codistillation.json"
BATCH, STEPS, TARGET, TEST_EVERY = 64, 264, 0.97, 2
# lr and weight decay: of SGD and K-FAC as in `exchange.py`
OPTIMIZERS = {"SGD": (0.05, 0.005), "AdamW": (0.003, 0.01), "K-FAC": (0.003, 0.0005)}


def main() -> None:
    """Run all trainings, keep the results, and print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    parser.add_argument("--data", nargs="*", default=["all", "halves"])
    parser.add_argument("--weights", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--burn_in", type=int, default=11)
    parser.add_argument("--every", type=int, default=11)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    comm = mpikfac.world()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    ways = product(options.data, options.optimizers, options.weights)
    for data, optimizer, weight in ways:
        rule = {"weight": weight, "burn_in": options.burn_in, "every": options.every}
        found = [trained(comm, data, optimizer, rule, seed) for seed in range(options.seeds)]
        if comm.rank == 0:
            results[name_of(data, optimizer, **rule)] = summary(found)
    if comm.rank == 0:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        report(results)


def name_of(data: str, optimizer: str, weight: float, burn_in: int, every: int) -> str:
    """Return the name of a way to train."""
    if not weight:
        return f"{data}, {optimizer}, apart"
    return f"{data}, {optimizer}, weight {weight:g}, burn-in {burn_in}, every {every}"


def trained(
    comm: Any, data: str, optimizer: str, rule: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """Train both groups; return steps to the target, accuracy and probabilities of each group.

    Collective over: comm.
    """
    found = datasets.load("digits")
    number = comm.rank * 2 // comm.size
    torch.manual_seed(mixed(seed, number))
    model = models.build("digits_cnn", 10, 1)
    codistillation = mpikfac.lab.Codistillation(model, comm, **rule)
    trainer = trainer_of(optimizer, model, codistillation.group)
    group = codistillation.group
    own = {"seed": mixed(seed, number), "rank": group.rank, "ranks": group.size}
    mine = torch.arange(len(found.train_images))
    if data == "halves":
        generator = torch.Generator().manual_seed(seed)
        mine = torch.randperm(len(mine), generator=generator)[number::2]
    images, labels = found.train_images[mine], found.train_labels[mine]
    batches = Batches(images, labels, BATCH, augment=None, **own)
    normalise = Normalise(found.train_images, torch.device("cpu"))
    reached, begun = None, OPTIMIZERS[optimizer][0]
    for step in range(STEPS):
        trainer.optimizer.param_groups[0]["lr"] = begun * (1 - step / STEPS)
        images, labels = batches.get(*divmod(step, len(mine) // BATCH))
        take_step(trainer, codistillation, normalise(images), labels)
        if (step + 1) % TEST_EVERY == 0 and reached is None:
            right = predicted(model, normalise(found.test_images)).argmax(1) == found.test_labels
            reached = step + 1 if right.double().mean() >= TARGET else None
    probabilities = predicted(model, normalise(found.test_images))
    right = probabilities.argmax(1) == found.test_labels
    one = {"steps": reached, "accuracy": right.double().mean().item(), "p": probabilities}
    return [group for rank, group in enumerate(comm.allgather(one)) if rank % (comm.size // 2) == 0]


def trainer_of(name: str, model: torch.nn.Module, group: Any) -> Any:
    """Return the trainer of a group."""
    lr, decay = OPTIMIZERS[name]
    if name == "AdamW":
        adamw = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)
        return mpikfac.FirstOrderTrainer(model, adamw, group)
    sgd = torch.optim.SGD(model.parameters(), lr, 0.9, weight_decay=decay)
    if name == "SGD":
        return mpikfac.FirstOrderTrainer(model, sgd, group)
    return mpikfac.KFAC(model, sgd, group, factor_update_steps=5, inv_update_steps=10)


def take_step(trainer: Any, codistillation: Any, images: Tensor, labels: Tensor) -> None:
    """Take a step of the group, with the term of the other group.

    Collective over: world if weights are swapped, else the group.
    """
    trainer.optimizer.zero_grad()
    outputs = trainer.model(images)
    loss = F.cross_entropy(outputs, labels) + codistillation.term(images, outputs)
    loss.backward()
    trainer.step()
    codistillation.end_step()


def predicted(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the probabilities of images, `[n, classes]`."""
    model.eval()
    with torch.no_grad():
        probabilities = model(images).softmax(1)
    model.train()
    return probabilities


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the results of all seeds: of models, and of pairs of models with different seeds."""
    every = [model for groups in runs for model in groups]
    pairs = [pair for some in combinations(runs, 2) for pair in product(*some)]
    of_pairs = [(one["p"], other["p"]) for one, other in pairs]
    return {
        "steps": [model["steps"] for model in every],
        "accuracy": [model["accuracy"] for model in every],
        "churn": [(p.argmax(1) != q.argmax(1)).double().mean().item() for p, q in of_pairs],
        "difference": [(p - q).abs().mean().item() for p, q in of_pairs],
    }


def report(results: dict[str, Any]) -> None:
    """Print means of each way to train, with deviations of models or standard errors of churn."""
    lines = [("way", "models", "steps to 97 %", "accuracy", "churn", "difference of probabilities")]
    for way, found in results.items():
        reached = [steps for steps in found["steps"] if steps is not None]
        never = len(found["steps"]) - len(reached)
        steps = f"{mean(reached):.0f} ± {stdev(reached):.0f}" if not never else f"{never} never"
        accuracy, count = found["accuracy"], len(found["steps"])
        churn = (f"{mean(v):.2%} ± {error(v):.2%}" for v in (found["churn"], found["difference"]))
        shown = f"{mean(accuracy):.2%} ± {stdev(accuracy):.2%}"
        lines.append((way, str(count), steps, shown, *churn))
    print("\n".join(table(lines)), flush=True)


def error(values: list[float]) -> float:
    """Return the standard error of a mean over pairs of seeds, by leaving out each seed in turn."""
    seeds = next(n for n in range(2, len(values)) if 4 * math.comb(n, 2) == len(values))
    pairs = [pair for pair in combinations(range(seeds), 2) for _ in range(4)]
    kept = [[v for v, pair in zip(values, pairs) if seed not in pair] for seed in range(seeds)]
    means = list(map(mean, kept))
    return math.sqrt((seeds - 1) / seeds * sum((one - mean(means)) ** 2 for one in means))


if __name__ == "__main__":
    main()
