"""Compare forms of wide factors: loss, CPU seconds of a step, and the cost of a refresh.

    OMP_NUM_THREADS=1 python benchmarks/wide.py learn [--seeds 0 1 2]
    OMP_NUM_THREADS=1 python benchmarks/wide.py refresh
    python benchmarks/wide.py known

`learn` trains two networks on enlarged digits with K-FAC: a convolutional network whose head has
9,216 inputs (batch 64, 48 steps), and a variational autoencoder with layers of 784 and 400 (batch
128, 240 steps). The forms apply to factors with more rows than a batch has vectors. Rates decay
linearly to 0; everything else is a default. `refresh` times decompositions of the heads of VGG-16
and AlexNet compared to a forward and backward pass of the head. Results are kept in
`results/wide.jsonl`, and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac.plan import LayerShape
from mpikfac_apps.problems.datasets import digits
from mpikfac_apps.text import table

RESULTS = Path(__file__).parent / "results" / "wide.jsonl"
FORMS: dict[str, Callable[[LayerShape], LayerShape] | None] = {
    "by default": None,
    "blocks of 1024": lambda layer: replace(layer, largest=1024),
    "blocks of 512": lambda layer: replace(layer, largest=512),
    "blocks of 256": lambda layer: replace(layer, largest=256),
    "blocks of 128": lambda layer: replace(layer, largest=128),
    "blocks of 64": lambda layer: replace(layer, largest=64),
    "diagonal of the longer side": lambda layer: replace(layer, diagonal=longer(layer)),
    "the shorter side alone": lambda layer: replace(layer, sides="GA"[longer(layer) == "G"]),
    "rank 64": lambda layer: replace(layer, rank=64, preconditioner="eigen"),
}


def longer(layer: LayerShape) -> str:
    """Return the side with more rows."""
    return "A" if layer.inputs > layer.outputs else "G"


class Convolutional(nn.Module):
    """Two convolutions, and a head of 9,216 inputs."""

    batch, epochs = 64, 2

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5)),
            nn.Linear(128, 10),
        )

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body((images - 0.13) / 0.31), labels)


class Variational(nn.Module):
    """A variational autoencoder with 20 units between layers of 400."""

    batch, epochs = 128, 20

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(784, 400)
        self.mean, self.spread = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        pixels = images.flatten(1)
        hidden = self.encoder(pixels).relu()
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(spread / 2)
        rebuilt = F.binary_cross_entropy_with_logits(self.decoder(code), pixels, reduction="sum")
        distance = (mean.square() + spread.exp() - spread - 1).sum() / 2
        return (rebuilt + distance) / len(images)


NETWORKS: dict[str, type[nn.Module]] = {"head": Convolutional, "vae": Variational}
HEADS = {"vgg16": (25088, 4096, 4096, 1000), "alexnet": (9216, 4096, 4096, 1000)}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("learn", "refresh", "known"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "learn":
        jobs = [(n, f, s) for s in options.seeds for n in NETWORKS for f in FORMS]
        for job in [job for job in jobs if job not in known()]:
            keep(job, learn(*job))
    elif options.part == "refresh":
        print("\n".join(table([refresh(name, sizes) for name, sizes in HEADS.items()])))
    report()


def learn(name: str, form: str, seed: int) -> dict[str, float]:
    """Train; return the test loss, and the median CPU seconds of a step once factors are cut."""
    data = digits()
    train, test = (
        (F.interpolate(images.float() / data.white, size=28, mode="bilinear"), labels)
        for images, labels in (
            (data.train_images, data.train_labels),
            (data.test_images, data.test_labels),
        )
    )
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    optimizer = mpikfac.KFACOptimizer(model, coverage=coverage(FORMS[form], model.batch))
    steps = len(train[0]) // model.batch * model.epochs
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    seconds = []
    for _ in range(model.epochs):
        for chosen in torch.randperm(len(train[0])).split(model.batch)[: steps // model.epochs]:
            start = time.process_time()
            optimizer.zero_grad()
            model.loss(train[0][chosen], train[1][chosen]).backward()
            optimizer.step()
            falling.step()
            seconds.append(time.process_time() - start)
    model.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        loss = statistics.mean(model.loss(*test).item() for _ in range(5))
    return {"loss": loss, "seconds": statistics.median(seconds[1:])}


def coverage(form: Callable[[LayerShape], LayerShape] | None, vectors: int) -> mpikfac.Coverage:
    """Return the form for factors of linear layers with more rows than vectors."""
    if form is None:
        return mpikfac.Coverage()

    def rule(layer: LayerShape) -> LayerShape:
        convolution = layer.name == "body.2"
        wide = max(layer.inputs, layer.outputs) > vectors and not convolution
        return form(layer) if wide else layer

    return mpikfac.Coverage(rule=rule)


def refresh(name: str, sizes: tuple[int, ...], batch: int = 64) -> tuple[str, ...]:
    """Return the seconds of a refresh, of both passes, and the ratio; medians."""
    layers = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    kfac = mpikfac.KFACOptimizer(model, lr=1e-6)
    trace, passes, refreshes = kfac.trainer.trace, [], []
    for _ in range(26):
        x, y = torch.randn(batch, sizes[0]).relu(), torch.randint(sizes[-1], (batch,))
        kfac.zero_grad()
        trace.clear()
        start = time.process_time()
        F.cross_entropy(model(x), y).backward()
        passes.append(time.process_time() - start - trace.seconds["statistics"])
        kfac.step()
        refreshes.append(trace.seconds["decompose"])
    refreshes = [seconds for seconds in refreshes[2:] if seconds]  # with factors cut
    both = statistics.median(refreshes), statistics.median(passes)
    return name, f"{both[0]:.2f} s", f"{both[1]:.2f} s", f"{both[0] / both[1]:.2f}"


def keep(job: tuple[str, str, int], result: dict[str, float]) -> None:
    """Append a result to the file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"job": job, "result": result}) + "\n")
    print(*job, result, flush=True)


def known() -> dict[tuple[str, str, int], dict[str, float]]:
    """Return all known results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {tuple(row["job"]): row["result"] for row in map(json.loads, lines)}


def report() -> None:
    """Print means over seeds."""
    rows = [("form", *(f"{name}: loss; ms" for name in NETWORKS))]
    for form in FORMS:
        cells = []
        for name in NETWORKS:
            found = [r for (n, f, _), r in known().items() if (n, f) == (name, form)]
            losses, seconds = ([each[kind] for each in found] for kind in ("loss", "seconds"))
            mean = f"{statistics.mean(losses):.4g}" if found else "-"
            step = f"{1e3 * statistics.median(seconds):.0f}" if found else "-"
            cells.append(f"{mean}; {step} ({len(found)} seeds)")
        rows.append((form, *cells))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
