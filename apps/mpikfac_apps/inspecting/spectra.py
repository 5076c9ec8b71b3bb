"""Compute and draw eigenvalues of factors, and condition numbers."""

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
from mpikfac.preconditioners import Preconditioner
from mpikfac_apps.cli import write_picture

FACTORS = "kfac/factors/", "kfac/gradient-factors/"  # prefixes of the names of running averages
NONE = torch.empty(0, dtype=torch.float64)
COLUMNS = 200  # the number of columns of a plotted spectrum
FLOOR = 1e-8  # the smallest plotted value, relative to the largest: below the precision of float32


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a layer's A `[inputs]` and G `[outputs]`, in ascending order.

    A spectrum contains the eigenvalues of all groups of a layer and of all blocks of a factor. A
    factor that is the identity has no eigenvalues.
    """

    layer: str
    a: Tensor
    g: Tensor

    def condition(
        self, preconditioner: Preconditioner, damping: float, relative: bool = False
    ) -> float:
        """Return the condition number of the matrix that a preconditioner inverts for `G (x) A`.

        For `EKFAC`, the eigenvalues are the products from which the preconditioner's own
        eigenvalues start. Rounding can make eigenvalues negative; these count as 0. For a layer
        with several groups, the result is an upper bound, because it includes pairs of A and G from
        different groups. A preconditioner that uses roots inverts powers of the factors, and the
        result is for these powers.
        """
        form, exponent = preconditioner.form, getattr(preconditioner, "exponent", None)
        a, g = (v[[0, -1]].clamp(min=0) if len(v) else torch.ones(2) for v in (self.a, self.g))
        unit_a, unit_g = (v.mean() if len(v) and relative else 1.0 for v in (self.a, self.g))
        if form.denominators or not (len(self.a) and len(self.g)):
            damped = a * g + damping * unit_a * unit_g
        elif relative:
            share = math.sqrt(damping) if form.both else damping
            damped = (a + share * unit_a) * (g + share * unit_g)
        elif form.damped and not form.both:
            damped = (a + damping) * (g + damping)
        else:
            means = self.a.mean(), self.g.mean()
            a += mpikfac.numerics.tikhonov_share(means[0] / means[1], damping)
            g += mpikfac.numerics.tikhonov_share(means[1] / means[0], damping)
            damped = a * g
        condition: float = (damped[1] / damped[0]).item() ** (exponent or 1)
        return condition


def layers(names: Iterable[str]) -> list[str]:
    """Return the layers with factors in a checkpoint, in natural order."""
    factor_names = (name.split("/", 2)[2] for name in names if name.startswith(FACTORS))
    return sorted({name.rpartition(".")[0] for name in factor_names}, key=natural)


def natural(name: str) -> list[str | int]:
    """Return a key that sorts "layer2" before "layer10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def factors(checkpoint: Mapping[str, Any], layer: str) -> dict[str, Tensor]:
    """Return a layer's stored factors by name: A `[inputs, inputs]` and G `[outputs, outputs]`.

    The shape is `[count, n, n]` if the layer has groups or a factor is a diagonal. "A0", "A1", ...
    are blocks along the diagonal of A.
    """
    own = tuple(f"{kind}{layer}" for kind in FACTORS)
    names = {name.rpartition(".")[2]: name for name in checkpoint if name.rpartition(".")[0] in own}
    return {
        side: mpikfac.numerics.unfold_triangle(checkpoint[names[side]])
        for side in sorted(names, key=natural)
    }


def of(checkpoint: Mapping[str, Any]) -> list[Spectrum]:
    """Return all layers' spectra; on a terminal, show progress, as large factors take seconds."""
    names = tqdm(layers(checkpoint), unit="layer", leave=False, disable=None)
    return [Spectrum(name, *sides(factors(checkpoint, name))) for name in names]


def sides(averages: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of A and of G, each in ascending order, from a layer's factors."""
    a, g = (
        [eigenvalues(factor) for name, factor in averages.items() if name.startswith(side)]
        for side in "AG"
    )
    return torch.cat([*a, NONE]).sort().values, torch.cat([*g, NONE]).sort().values


def eigenvalues(factor: Tensor) -> Tensor:
    """Return a factor's eigenvalues `[n]`, ascending in each matrix; NaN if it is not finite.

    They are computed in float64, because float32 cannot distinguish small eigenvalues from 0.
    """
    if not factor.isfinite().all():
        return torch.full([factor.shape[:-1].numel()], torch.nan, dtype=torch.float64)
    return torch.linalg.eigvalsh(factor.double()).flatten()


def draw(spectra: Sequence[Spectrum], conditions: Sequence[float], title: str, path: Path) -> None:
    """Plot a row per layer: the spectra of A and G as colours, and the condition number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = range(len(spectra))
    figure, axes = pyplot.subplots(
        ncols=3,
        sharey=True,
        figsize=(12, 2.5 + 0.17 * len(spectra)),
        width_ratios=(4, 4, 3),
        layout="constrained",
    )
    lines = {
        "A, input factors": [profile(spectrum.a) for spectrum in spectra],
        "G, output factors": [profile(spectrum.g) for spectrum in spectra],
    }
    for panel, (name, profiles) in zip(axes, lines.items()):
        image = panel.imshow(
            torch.stack(profiles).numpy(),
            cmap=pyplot.get_cmap("magma").with_extremes(bad="grey"),
            norm=matplotlib.colors.LogNorm(FLOOR, 1),
            aspect="auto",
            interpolation="nearest",
            extent=(0, 100, len(spectra) - 0.5, -0.5),
        )
        panel.set(title=name, xlabel="eigenvalues, largest first (%)")
    axes[0].set_yticks(rows, [spectrum.layer for spectrum in spectra], fontsize=8)
    axes[0].set_ylabel("layer (name of its module)")
    bar = figure.colorbar(image, ax=axes[:2], location="bottom", aspect=50, pad=0.02, extend="min")
    below = f"black: {FLOOR:g} or less, or negative; grey: the factor is 0 or not finite"
    bar.set_label(f"eigenvalue / largest eigenvalue of its factor ({below})")
    axes[2].plot(conditions, rows, "o", markersize=4)
    infinite = [row for row in rows if conditions[row] == math.inf]
    edge = axes[2].get_yaxis_transform()
    axes[2].plot([0.97] * len(infinite), infinite, ">", transform=edge)
    label = "condition number of the matrix to invert"
    axes[2].set(xscale="log", xlabel=label + ("\ntriangles: infinite" if infinite else ""))
    axes[2].xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())  # minor labels overlap
    finite = [condition for condition in conditions if condition < math.inf]
    if finite:  # labels need at least two powers of ten
        axes[2].set_xlim(10 ** math.floor(math.log10(min(finite))), 10 * max(finite))
    axes[2].grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(figure, path)
    pyplot.close(figure)


def profile(values: Tensor) -> Tensor:
    """Return `COLUMNS` eigenvalues of a spectrum in descending order, divided by the largest."""
    if not len(values):
        return torch.full([COLUMNS], torch.nan)
    chosen = torch.linspace(len(values) - 1, 0, COLUMNS).round().long()
    return (values[chosen] / values[-1]).clamp(min=FLOOR)
