"""Eigenvalues of K-FAC's factors, how hard they are to invert, and a picture of both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import mpikfac

FACTORS = "kfac/factors/"
COLUMNS = 200  # of the picture of a spectrum
FLOOR = 1e-8  # of the picture: float32 factors hold nothing below it, relative to their largest


@dataclass(frozen=True)
class Spectrum:
    """A layer's eigenvalues in ascending order, of A `[inputs]` and of G `[outputs]`."""

    layer: str
    a: Tensor
    g: Tensor

    def condition(self, solver: str, damping: float) -> float:
        """Largest by smallest eigenvalue of what this solver inverts for `A (x) G`.

        Rounding leaves eigenvalues below 0, which count as 0.
        """
        a, g = (values[[0, -1]].clamp(min=0) for values in (self.a, self.g))
        if solver == "eigen":
            damped = a * g + damping
        elif solver == "unsplit-inverse":
            damped = (a + damping) * (g + damping)
        else:
            means = self.a.mean(), self.g.mean()
            a += mpikfac.tikhonov_share(*means, damping)
            g += mpikfac.tikhonov_share(*means[::-1], damping)
            damped = a * g
        return (damped[1] / damped[0]).item()


def layers(names: Iterable[str]) -> list[str]:
    """The layers whose factors are among a checkpoint's items, in natural order."""
    inputs = (name for name in names if name.startswith(FACTORS) and name.endswith(".A"))
    found = (name.removeprefix(FACTORS).removesuffix(".A") for name in inputs)
    return sorted(found, key=natural)


def natural(name: str) -> list[str | int]:
    """A key that sorts "layer2" before "layer10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def factors(checkpoint: Mapping[str, Any], layer: str) -> tuple[Tensor, Tensor]:
    """The averages A `[inputs, inputs]` and G `[outputs, outputs]` of a layer."""
    packed = (checkpoint[f"{FACTORS}{layer}.{side}"] for side in "AG")
    a, g = map(mpikfac.unfold_triangle, packed)
    return a, g


def of(checkpoint: Mapping[str, Any]) -> list[Spectrum]:
    """All layers' spectra, with a bar on a terminal: an order of 4,608 takes seconds."""
    names = tqdm(layers(checkpoint), unit="layer", leave=False, disable=None)
    return [Spectrum(name, *map(eigenvalues, factors(checkpoint, name))) for name in names]


def eigenvalues(factor: Tensor) -> Tensor:
    """In ascending order `[n]`; NaN if the factor is not finite.

    In float64: the small ones of a float32 factor are below what float32 can tell from 0.
    """
    if not factor.isfinite().all():
        return torch.full([len(factor)], torch.nan, dtype=torch.float64)
    return torch.linalg.eigvalsh(factor.double())


def draw(found: Sequence[Spectrum], solver: str, damping: float, title: str, path: Path) -> None:
    """A line per layer: spectra of A and G in colours, and condition numbers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = range(len(found))
    conditions = [spectrum.condition(solver, damping) for spectrum in found]
    figure, axes = pyplot.subplots(
        ncols=3,
        sharey=True,
        figsize=(12, 2.5 + 0.17 * len(found)),
        width_ratios=(4, 4, 3),
        layout="constrained",
    )
    lines = {
        "A, input factors": [profile(spectrum.a) for spectrum in found],
        "G, output factors": [profile(spectrum.g) for spectrum in found],
    }
    for panel, (name, profiles) in zip(axes, lines.items()):
        image = panel.imshow(
            torch.stack(profiles).numpy(),
            cmap=pyplot.get_cmap("magma").with_extremes(bad="grey"),
            norm=matplotlib.colors.LogNorm(FLOOR, 1),
            aspect="auto",
            interpolation="nearest",
            extent=(0, 100, len(found) - 0.5, -0.5),
        )
        panel.set(title=name, xlabel="eigenvalues, largest first (%)")
    axes[0].set_yticks(rows, [spectrum.layer for spectrum in found], fontsize=8)
    bar = figure.colorbar(image, ax=axes[:2], location="bottom", aspect=50, pad=0.02, extend="min")
    bar.set_label("eigenvalue / largest eigenvalue of its factor (grey: zero or not finite)")
    axes[2].plot(conditions, rows, "o", markersize=4)
    infinite = [row for row in rows if conditions[row] == math.inf]
    edge = axes[2].get_yaxis_transform()
    axes[2].plot([0.97] * len(infinite), infinite, ">", transform=edge)
    axes[2].set(title="condition number", xscale="log", xlabel="(triangles: infinite)")
    axes[2].xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())  # they overlap
    finite = [condition for condition in conditions if condition < math.inf]
    if finite:  # at least two powers of ten, which have labels
        axes[2].set_xlim(10 ** math.floor(math.log10(min(finite))), 10 * max(finite))
    axes[2].grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def profile(values: Tensor) -> Tensor:
    """A spectrum as `COLUMNS` of its eigenvalues, the largest one first and equal to 1."""
    chosen = torch.linspace(len(values) - 1, 0, COLUMNS).round().long()
    return (values[chosen] / values[-1]).clamp(min=FLOOR)
