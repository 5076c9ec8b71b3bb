"""The options of the influence program; printing the help does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpikfac_apps.inspecting.options import new_file
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, in_home, positional, read_by


def scores_file(text: str) -> Path:
    """Return `text` as the path of a new .h5 file."""
    return new_file(text, ".h5")


def page_file(text: str) -> Path:
    """Return `text` as the path of a new .html file."""
    return new_file(text, ".html")


@dataclass(frozen=True)
class InfluenceOptions:
    """Score the training images of a K-FAC run by their influence on the loss of test images.

    Args:
        path: the directory of a run, whose newest checkpoint is used, or that of a checkpoint
            inside the directory of a run.
        queries: the number of test images, taken from the start of the test set.
        damping: the damping of the curvature, relative to the mean eigenvalue of each layer, or of
            each group of a layer.
        top: the number of queries to print, and the number of most helpful and of most
            harmful images to print for each.
        out: a new file for all scores, .h5; null for none.
        report: a new file for a page that shows, for all queries, the images with the largest
            scores, .html; null for none.
        trust: allow executing the files FILE.py of the run's `model` and `data.name`.
        data_path: the directory of the data set; null for the one that the run used.
        device: the device of each rank; "auto" uses a GPU if there is one.
    """

    path: Path = positional()
    queries: int = bounded(20, ">= 1")
    damping: float = bounded(0.1, "> 0")
    top: int = bounded(5, ">= 1")
    out: Path | None = read_by(scores_file, None)
    report: Path | None = read_by(page_file, None)
    trust: bool = False
    data_path: str | None = in_home(None)
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"


INFLUENCE = CommandLine("mpikfac influence", InfluenceOptions)
