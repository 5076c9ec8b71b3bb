"""The options of `mpikfac reproduce`; printing the help does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import positional


@dataclass(frozen=True)
class ReproduceOptions:
    """List published results, or reproduce one of them. Runs without MPI.

    Args:
        name: the result to reproduce; null lists all results, or writes them all to `appendix`.
        appendix: a directory for an artifact description, artifact.md and artifact.html: hardware,
            versions, commands, expected and actual values; null for none.
    """

    name: str | None = positional(default=None)
    appendix: Path | None = None


REPRODUCE = CommandLine("mpikfac reproduce", ReproduceOptions)
