"""Compare predicted with actual changes of losses: influence and SOURCE for runs of K-FAC.

    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/influence.py

A network learns 600 digits, some with wrong labels, by K-FAC. Then it is trained on random
halves of the images, and the loss of each of 150 queries on a half is compared with the sum of the
scores of the images in the half: the linear datamodeling score (LDS), a rank correlation over the
halves, as a mean over queries. The ceiling is that of a perfect predictor of the mean over seeds,
sqrt(2 r / (1 + r)) by Spearman and Brown, if two halves of the seeds have the correlation r. Errors
are those of the choice of queries, without that of the halves.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac.lab import Curvature, Segment, influence, self_influence, source
from mpikfac_apps.problems import datasets

IMAGES, QUERIES, BATCH, RATE, DAMPING = 600, 150, 30, 0.02, 0.03
DAMPINGS = {
    "gradient product": 1e6,
    **{f"relative {share:g}": mpikfac.Damping(relative=share) for share in (0.01, 0.1, 1.0)},
    "the run's": DAMPING,
}


def data(share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return images `[n, 64]` and labels, queries last, and which training labels are wrong.

    A share of the training labels is wrong, each by three classes.
    """
    found = datasets.load("digits")
    images = torch.cat([found.train_images, found.test_images]).double().flatten(1)
    labels = torch.cat([found.train_labels, found.test_labels])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    order = order[: IMAGES + QUERIES]
    images, labels = ((images - images.mean()) / images.std())[order], labels[order]
    wrong = torch.rand(IMAGES, generator=torch.Generator().manual_seed(5)) < share
    labels[:IMAGES][wrong] = (labels[:IMAGES][wrong] + 3) % 10
    return images, labels, wrong


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def train(
    images: Tensor, labels: Tensor, seed: int, epochs: int, folder: str = "", kept: Collection = ()
) -> mpikfac.KFAC:
    """Return a trainer after all steps; `kept` steps are saved in `folder`."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    grafting = mpikfac.NoGrafting()
    settings = {"factor_update_steps": 1, "inv_update_steps": 10, "budget": None}
    kfac = mpikfac.KFAC(
        model, optimizer, preconditioner="eigen", damping=DAMPING, grafting=grafting, **settings
    )
    steps = epochs * (len(images) // BATCH)
    order = torch.cat([torch.randperm(len(images)) for _ in range(epochs)])
    for step, batch in enumerate(order.split(BATCH)[:steps]):
        if step in kept:
            world = mpikfac.world()
            mpikfac.save_checkpoint(world, folder, kfac.state_dict(), step, keep=len(kept))
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        kfac.step()
    return kfac


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the rank correlation of columns."""
    a, b = (x.argsort(0).argsort(0).double() for x in (a, b))
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def scores(examples, queries, seed: int, epochs: int, wrong: Tensor) -> dict[str, Tensor]:
    """Return the scores `[queries, images]` of one run by every method."""
    steps, found = epochs * IMAGES // BATCH, {}
    kept = [steps // 6, steps // 2, 5 * steps // 6]  # the middle of each third
    with tempfile.TemporaryDirectory() as folder:
        kfac = train(*examples, seed, epochs, folder, kept)
        segments = []
        for third, step in enumerate(kept):
            curvature = Curvature.load(Path(folder) / f"step-{step:09d}", network())
            curvature.model.eval()
            part = range(third * steps // 3, (third + 1) * steps // 3)
            length = sum(RATE * (1 - step / steps) for step in part)
            segments.append(Segment(curvature, length, DAMPING))
    curvature = Curvature.of(kfac)
    kfac.model.eval()
    for name, damping in DAMPINGS.items():
        found[name] = influence(curvature, losses, [examples], queries, damping)
    found["SOURCE, 3 segments"] = source(segments, losses, [examples], queries)
    measured = Curvature.measured(kfac.model, lambda model, batch: model(batch[0]), [examples])
    relative = mpikfac.Damping(relative=0.1)
    found["measured, EKFAC, 0.1"] = influence(measured, losses, [examples], queries, relative)
    if importlib.util.find_spec("kronfluence"):
        found["kronfluence, EKFAC, 0.1"] = kronfluence_scores(kfac.model, examples, queries)
    print_suspects(kfac, examples, wrong)
    kfac.close()
    return found


def kronfluence_scores(model: nn.Module, examples, queries) -> Tensor:
    """Return scores of kronfluence in float32, with a tenth of the mean eigenvalue as damping."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.utils.data import TensorDataset

    class Classification(Task):
        def compute_train_loss(self, batch, model, sample=False):
            outputs, labels = model(batch[0]), batch[1]
            if sample:
                labels = torch.multinomial(outputs.detach().softmax(-1), 1)[:, 0]
            return F.cross_entropy(outputs, labels, reduction="sum")

        def compute_measurement(self, batch, model):
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    task = Classification()
    prepared = prepare_model(copy.deepcopy(model).float(), task)
    train_set, query_set = (TensorDataset(x.float(), y) for x, y in (examples, queries))
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "digits", model=prepared, task=task, output_dir=folder, cpu=True, disable_tqdm=True
        )
        analyzer.fit_all_factors(
            "ekfac", train_set, 200, factor_args=FactorArguments(strategy="ekfac")
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            query_set,
            train_set,
            len(query_set),
            per_device_train_batch_size=200,
            score_args=ScoreArguments(damping_factor=None),
        )
        return analyzer.load_pairwise_scores("scores")["all_modules"].double()


def print_suspects(kfac: mpikfac.KFAC, examples, wrong: Tensor) -> None:
    """Print how well self-influence and the loss find wrong labels."""
    kfac.model.eval()
    curvatures = {"the run's factors": Curvature.of(kfac)}
    curvatures["measured, EKFAC"] = Curvature.measured(
        kfac.model, lambda model, batch: model(batch[0]), [examples]
    )
    found = {
        f"self-influence, {name}": self_influence(curvature, losses, [examples])
        for name, curvature in curvatures.items()
    }
    found["loss"] = losses(kfac.model, examples).detach()
    for name, values in found.items():
        area = (values[wrong][:, None] > values[~wrong]).double().mean()
        print(f"wrong labels by {name}: area under the curve {area:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--wrong", type=float, default=0.1, help="the share of wrong labels")
    parser.add_argument("--halves", type=int, default=24, help="0: find wrong labels alone")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each half")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    images, labels, wrong = data(options.wrong)
    examples, queries = (images[:IMAGES], labels[:IMAGES]), (images[IMAGES:], labels[IMAGES:])
    if not options.halves:
        for seed in range(options.seeds):
            kfac = train(*examples, seed, options.epochs)
            print_suspects(kfac, examples, wrong)
            kfac.close()
        return
    generator = torch.Generator().manual_seed(9)
    halves = torch.rand(options.halves, IMAGES, generator=generator).argsort(1) < IMAGES // 2
    actual = torch.empty(options.halves, options.seeds, QUERIES)
    for number, half in enumerate(halves):
        for seed in range(options.seeds):
            own = [tensor[half] for tensor in examples]
            kfac = train(*own, number * options.seeds + seed, options.epochs)
            with torch.no_grad():
                actual[number, seed] = losses(kfac.model, queries)
            kfac.close()
    middle = options.seeds // 2
    r = correlation(actual[:, :middle].mean(1), actual[:, middle:].mean(1)).mean()
    ceiling = (2 * r / (1 + r)) ** 0.5
    print(f"two halves of the seeds agree to {r:.3f}; the ceiling is {ceiling:.3f}", flush=True)
    for name, score in scores(examples, queries, 1000, options.epochs, wrong).items():
        found = correlation(-(halves.double() @ score.T), actual.mean(1))
        print(f"{name:24} LDS {found.mean():.3f} +- {found.std() / QUERIES**0.5:.3f}")


if __name__ == "__main__":
    main()
