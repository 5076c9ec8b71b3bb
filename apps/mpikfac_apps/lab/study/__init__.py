"""Studies: many training runs described by a single file, their results, and a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import positional


@dataclass(frozen=True)
class StudyOptions:
    """Run a study (one training run per combination of some options), and write a report.

    Args:
        study: the file of the study, in YAML; docs/extensions/study.md describes its format.
        run_dir: the directory of all runs and of the report; null for runs/NAME, with the name of
            the study.
        report_only: only write the report from existing files, without running anything.
    """

    study: Path = positional()
    run_dir: Path | None = None
    report_only: bool = False


STUDY = CommandLine("mpikfac study", StudyOptions)
