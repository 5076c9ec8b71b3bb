"""Compare Laplace approximations of a network: priors by evidence and by held-out images.

    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/posterior.py --picture laplace.svg

A network learns 400 digits, a tenth with wrong labels, by K-FAC without weight decay. Of the other
digits, 400 choose the precision of the prior, and all others are the test; foreign images are the
test images with permuted pixels. Where laplace-torch is installed, it runs for comparison.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac.lab import Curvature, evidence_prior, log_evidence, output_variances, probit
from mpikfac_apps.lab.laplace import measures
from mpikfac_apps.problems import datasets

IMAGES, HELDOUT, BATCH, EPOCHS, RATE, DAMPING = 400, 400, 40, 150, 0.02, 0.03
GRID = torch.logspace(-2, 4, 25).tolist()


def data() -> tuple[Tensor, Tensor]:
    """Return all images `[n, 64]` and labels in a fixed order; a tenth of the first are wrong."""
    found = datasets.load("digits")
    images = torch.cat([found.train_images, found.test_images]).float().flatten(1)
    labels = torch.cat([found.train_labels, found.test_labels])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = ((images - images.mean()) / images.std())[order], labels[order]
    wrong = torch.rand(IMAGES, generator=torch.Generator().manual_seed(5)) < 0.1
    labels[:IMAGES][wrong] = (labels[:IMAGES][wrong] + 3) % 10
    return images, labels


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    fisher_type: str = "type-2",
    size: int = BATCH,
    epochs: int = EPOCHS,
) -> mpikfac.KFAC:
    """Return a trainer after all steps, with factors of the Fisher matrix."""
    kfac = mpikfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        preconditioner="eigen",
        damping=DAMPING,
        grafting=mpikfac.NoGrafting(),
        estimator=mpikfac.Estimator(fisher_type=fisher_type, subsample=1),
        factor_update_steps=1,
        inv_update_steps=10,
        budget=None,
    )
    steps = epochs * (len(images) // size)
    order = torch.cat([torch.randperm(len(images)) for _ in range(epochs)])
    for step, batch in enumerate(order.split(size)[:steps]):
        kfac.optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        kfac.optimizer.zero_grad()
        outputs = model(images[batch])
        if fisher_type != "empirical":
            kfac.record(outputs)
        F.cross_entropy(outputs, labels[batch]).backward()
        kfac.step()
    return kfac


def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def line(name: str, predict: Callable[[Tensor], Tensor], test: Sequence[Tensor]) -> None:
    """Print the measures of predictions, and the CPU time that they took."""
    images, labels, foreign = test
    began = time.process_time()
    found, others = predict(images), predict(foreign)
    print(
        f"{name:46} NLL {measures.negative_log_likelihood(found, labels):.4f}"
        f"  ECE {measures.calibration_error(found, labels):.3f}"
        f"  Brier {measures.brier_score(found, labels):.3f}"
        f"  accuracy {measures.accuracy(found, labels):.3f}"
        f"  OOD AUROC {measures.auroc(found, others):.3f}"
        f"  {time.process_time() - began:.1f} s",
        flush=True,
    )


def linear(curvature: Curvature, images: Tensor, priors: Sequence[float]) -> Tensor:
    """Return probabilities `[priors, images, classes]`."""
    parts = images.split(250)
    return torch.cat(
        [
            probit(
                curvature.model(part).detach(),
                output_variances(curvature, outputs, part, IMAGES, priors),
            )
            for part in parts
        ],
        1,
    )


def own(
    curvature: Curvature, name: str, images: Tensor, labels: Tensor, test: Sequence[Tensor]
) -> dict[str, float]:
    """Print the lines of both priors, and return their precisions."""
    likelihood = -F.cross_entropy(
        curvature.model(images[:IMAGES]), labels[:IMAGES], reduction="sum"
    ).item()
    heldout = slice(IMAGES, IMAGES + HELDOUT)
    losses = [
        measures.negative_log_likelihood(found, labels[heldout])
        for found in linear(curvature, images[heldout], GRID)
    ]
    priors = {
        "evidence": evidence_prior(curvature, IMAGES),
        "held-out": GRID[losses.index(min(losses))],
    }
    for how, prior in priors.items():
        evidence = log_evidence(curvature, likelihood, IMAGES, prior)
        about = f"{name}, {how}: {prior:.2f}, evidence {evidence:.1f}"
        line(about, lambda x, prior=prior: linear(curvature, x, [prior])[0], test)
    return priors


def peers(model: nn.Module, images: Tensor, labels: Tensor, test: Sequence[Tensor]) -> None:
    """Print the lines of laplace-torch, with the largest evidence."""
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(images[:IMAGES], labels[:IMAGES]), 200)
    for subset, structure in (("all", "kron"), ("all", "full"), ("last_layer", "kron")):
        other = Laplace(model, "classification", subset, structure)
        other.fit(loader)
        other.optimize_prior_precision(method="marglik", pred_type="glm", link_approx="probit")
        prior = other.prior_precision
        evidence = other.log_marginal_likelihood(prior).item()
        about = f"laplace-torch {subset} {structure}: {prior.item():.2f}, evidence {evidence:.1f}"
        line(
            about,
            lambda x, other=other: torch.cat(
                [other(p, pred_type="glm", link_approx="probit").detach() for p in x.split(250)]
            ),
            test,
        )


def draw(
    curvature: Curvature, test: Sequence[Tensor], priors: dict[str, float], path: Path
) -> None:
    """Draw the loss and the detection of foreign images by the precision of the prior."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images, labels, foreign = test
    found, others = (linear(curvature, x, GRID) for x in (images, foreign))
    mode, of_mode = (curvature.model(x).softmax(1).detach() for x in (images, foreign))
    figure, axes = pyplot.subplots(ncols=2, figsize=(9, 3), layout="constrained")
    losses = [measures.negative_log_likelihood(p, labels) for p in found]
    areas = [measures.auroc(p, q) for p, q in zip(found, others)]
    values = {
        "loss of test images (NLL)": (losses, measures.negative_log_likelihood(mode, labels)),
        "foreign images found (AUROC)": (areas, measures.auroc(mode, of_mode)),
    }
    for panel, (title, (of_grid, of_mode_alone)) in zip(axes, values.items()):
        panel.plot(GRID, of_grid, "C0", label="linearised outputs")
        panel.axhline(of_mode_alone, color="grey", linestyle=":", label="weights of the run")
        for colour, (how, prior) in zip(("C3", "C2"), priors.items()):
            panel.axvline(prior, color=colour, linestyle="--", label=f"prior by {how}")
        panel.set(title=title, xscale="log", xlabel="precision of the prior")
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="a file for curves of the first seed, .svg")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    images, labels = data()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    rest = images[IMAGES + HELDOUT :]
    test = rest, labels[IMAGES + HELDOUT :], rest[:, order]
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        kfac = train(network(), images[:IMAGES], labels[:IMAGES])
        model = kfac.model.eval()
        print(f"seed {seed}")
        line("weights of the run (MAP)", lambda x, m=model: m(x).softmax(1).detach(), test)
        own(Curvature.of(kfac), "the run's factors", images, labels, test)
        parts = images[:IMAGES].split(200)
        kinds = {"products": "measured factors", "squares": "measured, EKFAC"}
        for eigenvalues, name in kinds.items():
            curvature = Curvature.measured(model, outputs, parts, eigenvalues=eigenvalues)
            priors = own(curvature, name, images, labels, test)
        if importlib.util.find_spec("laplace"):
            peers(model, images, labels, test)
        else:
            print("laplace-torch is not installed: pip install laplace-torch")
        if options.picture and seed == 0:
            draw(curvature, test, priors, options.picture)
        kfac.close()


if __name__ == "__main__":
    main()
