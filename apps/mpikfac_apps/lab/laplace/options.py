"""The options of a Laplace approximation; printing the help does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpikfac_apps.inspecting.options import new_file
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, in_home, positional, read_by

PRIORS = "evidence", "heldout"


def predictions_file(text: str) -> Path:
    """Return `text` as the path of a new .h5 file."""
    return new_file(text, ".h5")


def prior(text: str) -> str:
    """Check and return the text of a prior: one of `PRIORS`, or a number above 0."""
    try:
        number = math.inf if text in PRIORS else float(text)
    except ValueError:
        number = math.nan
    if not number > 0 or (number == math.inf and text not in PRIORS):
        raise ValueError(f"prior={text} must be evidence, heldout, or a number above 0")
    return text


@dataclass(frozen=True)
class LaplaceOptions:
    """Evaluate a run's network with a Gaussian posterior over its weights (Laplace approximation).

    Args:
        path: the directory of a run, whose newest checkpoint is used, or of a checkpoint inside the
            directory of a run.
        weights: the weights that have a posterior: "all" for all that factors cover, or "last" for
            those of the last layer; all other weights are fixed.
        prior: the precision of the prior: a number; "evidence" for the one that maximises the
            evidence of the training images; or "heldout" for the one that minimises the loss on
            every second test image.
        samples: the number of samples of the weights whose predictions are averaged; 0 for none.
        measure: measure the curvature in passes over the training images, as in EKFAC, instead of
            using the factors of the run.
        ood: foreign images: "permuted" for the test images with permuted pixels, the name of a data
            set, or FILE.py:FUNCTION.
        ood_path: the directory of the data set `ood`.
        out: a new file for all predictions, .h5; null for none.
        trust: allow executing the files FILE.py of `ood` and of the run's `model` and `data.name`.
        data_path: the directory of the data set; null for the one that the run used.
        device: the device of each rank; "auto" uses a GPU if there is one.
        seed: the seed of sampled weights, and of permuted pixels.
    """

    path: Path = positional()
    weights: Literal["all", "last"] = "all"
    prior: str = read_by(prior, "heldout")
    samples: int = bounded(20, ">= 0")
    measure: bool = False
    ood: str = "permuted"
    ood_path: str | None = in_home(None)
    out: Path | None = read_by(predictions_file, None)
    trust: bool = False
    data_path: str | None = in_home(None)
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    seed: int = bounded(0, ">= 0", "< 4294967296")


LAPLACE = CommandLine("mpikfac laplace", LaplaceOptions)
