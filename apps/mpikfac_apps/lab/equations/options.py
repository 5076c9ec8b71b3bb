"""The options of the equation solver; printing the help does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpikfac_apps.cli import picture
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, read_by


@dataclass(frozen=True)
class EquationsOptions:
    """Solve a differential equation with a network, and print the error of the solution.

    Args:
        problem: the equation; "inverse" also finds two coefficients from 60 values of the solution.
        points: the number of points at which the equation has to hold; about a third as many points
            with given values are added on the border.
        width: the width of the three hidden layers.
        optimizer: "sample-space" for Gauss-Newton, on any number of ranks; or, on a single rank,
            "adam", "lbfgs", "adam-lbfgs" (half of the time each), "soap" or "kfac".
        rate: the learning rate, which "sample-space" does not use; null for the default.
        seconds: the CPU seconds to spend on steps, as measured on rank 0.
        seed: the seed of initial weights and of points.
        picture: a file for a picture of the solution and of its error, .pdf, .png or .svg.
    """

    problem: Literal["poisson", "helmholtz", "heat", "burgers", "inverse"] = "burgers"
    points: int = bounded(2000, ">= 8", "<= 1048576")
    width: int = bounded(64, ">= 1", "<= 65536")
    optimizer: Literal["sample-space", "adam", "lbfgs", "adam-lbfgs", "soap", "kfac"] = (
        "sample-space"
    )
    rate: float | None = bounded(None, "> 0")
    seconds: float = bounded(60.0, "> 0")
    seed: int = bounded(0, ">= 0", "< 4294967296")
    picture: Path | None = read_by(picture, None)


EQUATIONS = CommandLine("mpikfac equations", EquationsOptions)
