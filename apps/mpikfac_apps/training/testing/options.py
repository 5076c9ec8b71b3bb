"""The options for evaluating a run's network; printing the help does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import in_home, positional


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate the network in a checkpoint on the test images of its run, on one or more ranks.

    Args:
        path: the directory of a run, whose newest checkpoint is used, or of a checkpoint inside a
            run's directory.
        weights: a file of weights to evaluate instead of the checkpoint's weights, such as
            RUN_DIR/best.pt; null for the checkpoint's weights, or for their averages if the run
            uses `ema_decay`.
        trust: execute the Python files that the run's `model` and `data.name` refer to.
        data_path: the directory of the data set; null for the one that the run used.
        device: the device of each rank; "auto" uses a GPU if there is one.
    """

    path: Path = positional()
    weights: Path | None = None
    trust: bool = False
    data_path: str | None = in_home(None)
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"


EVALUATE = CommandLine("mpikfac evaluate", EvaluateOptions)
