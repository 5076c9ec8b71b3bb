"""The options of the model check; printing the help does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, positional, read_by
from mpikfac_apps.text import MOST, counts


@dataclass(frozen=True)
class CheckOptions:
    """Check which layers of a model K-FAC covers, and compare its results with autograd.

    Args:
        model: the model: the name of a network, such as resnet20; timm:NAME for a network from
            timm; or FILE.py:FUNCTION, where the function returns the model.
        input: the shape of an example, such as 3,32,32. null for a named network's default shape;
            required for a model from FILE.py.
        tokens: the vocabulary size if examples are tokens, which are integers below `tokens`; null
            if examples are real numbers.
        classes: the number of classes, for named networks and functions that take `classes`.
        batch: the number of examples on each rank.
        ranks: the number of ranks to plan for; null for all ranks of the job, or for 4 if the job
            has a single rank.
    """

    model: str = positional()
    input: tuple[int, ...] | None = read_by(counts, None)
    tokens: int | None = bounded(None, ">= 1")
    classes: int = bounded(10, ">= 1")
    batch: int = bounded(4, ">= 1")
    ranks: int | None = bounded(None, ">= 1", f"<= {MOST}")


CHECK = CommandLine("mpikfac check", CheckOptions)
