"""Compare Laplace approximations of a network: priors by evidence and by held-out images.

    OMP_NUM_THREADS=1 PYTHONPATH=apps python benchmarks/posterior.py
    PYTHONPATH=apps python benchmarks/posterior.py --picture

A network learns 400 digits, a tenth with wrong labels, by K-FAC without weight decay. Of the other
digits, 400 choose the precision of the prior, and all others are the test; foreign images are the
test images with permuted pixels. Where laplace-torch is installed, it runs for comparison. The
curves of all seeds are kept in `results/posterior.json`; `--picture` draws them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

import mpikfac
from mpikfac.lab import Curvature, evidence_prior, log_evidence, output_variances, probit
from mpikfac_apps.lab.laplace import measures
from mpikfac_apps.lab.study.report.style import (
    LINES,
    QUIET,
    WIDTH,
    figure_file,
    legend,
    styled,
    variant_style,
)
from mpikfac_apps.problems import datasets

RESULTS = Path(__file__).parent / "results" / "posterior.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "laplace.svg"
Curves = dict[str, Any]

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


def curves(curvature: Curvature, test: Sequence[Tensor], priors: dict[str, float]) -> Curves:
    """Return the loss and the detection of foreign images by the precision of the prior."""
    images, labels, foreign = test
    found, others = (linear(curvature, x, GRID) for x in (images, foreign))
    mode, of_mode = (curvature.model(x).softmax(1).detach() for x in (images, foreign))
    return {
        "priors": priors,
        "precision": GRID,
        "loss": [measures.negative_log_likelihood(p, labels) for p in found],
        "area": [measures.auroc(p, q) for p, q in zip(found, others)],
        "loss of weights": measures.negative_log_likelihood(mode, labels),
        "area of weights": measures.auroc(mode, of_mode),
    }


def draw(known: Sequence[Curves]) -> None:
    """Draw the curves of all seeds, and the priors by evidence and by held-out images."""
    titles = {
        "loss": "loss of test images (negative log-likelihood)",
        "area": "foreign images found (area under the ROC curve)",
    }
    marks = {"evidence": variant_style(1), "held-out": variant_style(2)}
    names = {"evidence": "prior by evidence", "held-out": "prior by held-out images"}
    ticks = [10.0**power for power in range(-2, 5)]
    with styled():
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, (key, title) in zip(panels, titles.items()):
            draw_curves(panel, known, key, marks)
            panel.set(title=title, xlabel="precision of the prior")
            panel.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        inset = panels[0].inset_axes((0.45, 0.4, 0.54, 0.56), xlim=(20, 1e4), ylim=(0.43, 0.49))
        draw_curves(inset, known, "loss", marks)
        inset.set_xticks([100, 1000], ["100", "1,000"])
        panels[0].indicate_inset_zoom(inset)
        lines = {}
        for seed in range(len(known)):
            lines[f"linearised outputs, seed {seed}"] = posterior(seed)
            lines[f"weights of the run, seed {seed}"] = weights(seed)
        shown = {names[how]: style | {"linestyle": ""} for how, style in marks.items()}
        legend(figure, {**lines, **shown}, columns=3)
    PICTURE.write_bytes(figure_file(figure, "svg"))


def draw_curves(
    panel: Axes, known: Sequence[Curves], key: str, marks: dict[str, dict[str, Any]]
) -> None:
    """Draw a measure by the precision of the prior, and mark the chosen precisions."""
    for seed, found in enumerate(known):
        along, values = found["precision"], found[key]
        panel.plot(along, values, **posterior(seed))
        panel.axhline(found[f"{key} of weights"], **weights(seed))
        for how, prior in found["priors"].items():
            near = min(range(len(along)), key=lambda at: abs(math.log(along[at] / prior)))
            panel.plot(prior, values[near], **marks[how], markersize=8)
    panel.set_xscale("log")
    panel.xaxis.set_minor_locator(NullLocator())


def posterior(seed: int) -> dict[str, Any]:
    """Return the style of the linearised outputs of a seed."""
    return variant_style(0) | {"marker": "", "linestyle": LINES[seed]}


def weights(seed: int) -> dict[str, Any]:
    """Return the style of the weights of a seed."""
    return {"color": QUIET, "linestyle": LINES[seed], "linewidth": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", action="store_true", help="draw the known curves, run nothing")
    options = parser.parse_args()
    if options.picture:
        draw(json.loads(RESULTS.read_text()))
        return
    logging.disable(logging.WARNING)
    images, labels = data()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    rest = images[IMAGES + HELDOUT :]
    test = rest, labels[IMAGES + HELDOUT :], rest[:, order]
    known: list[Curves] = []
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
        known.append(curves(curvature, test, priors))
        kfac.close()
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, known)) + "\n]\n")


if __name__ == "__main__":
    main()
