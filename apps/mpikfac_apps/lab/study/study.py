"""Run a study (one training run per combination of some options), and write a report.

    mpikfac study jobs/studies/digits.yaml

The cells run one after another. An interrupted study resumes with the interrupted cell. Complete
cells do not run again; a cell whose options have changed is a new cell. If a cell receives a
request to stop because the study's allocation ends soon, the study ends as well.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mpikfac import files
from mpikfac_apps.cli import complain
from mpikfac_apps.guard.lock import Lock
from mpikfac_apps.lab.study import STUDY, jobs
from mpikfac_apps.lab.study.progress import StudyProgress
from mpikfac_apps.lab.study.report import page
from mpikfac_apps.lab.study.spec import STOPPED, Study, read, slug


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells that are not complete, and write the report.

    Returns:
        0, or 1 if a cell failed, 2 if the study is invalid or a file cannot be used, 75 if the
        study was stopped early, 130 if it was interrupted.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = STUDY.read(arguments)
        study = read(options.study)
        directory = options.run_dir or Path("runs") / slug(study.name)
        code = 0 if options.report_only else run(study, directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = page.write(study, directory, ["mpikfac", "study", *arguments])
    except (OSError, ValueError) as error:
        complain("mpikfac study", error)
        return 2
    except KeyboardInterrupt:
        print("mpikfac study: interrupted; the same command resumes the study", file=sys.stderr)
        return 130
    print(f"report: {path}")
    return code


def run(study: Study, directory: Path) -> int:
    """Run the cells that are not complete; return the exit code of the study.

    Raises:
        ValueError: no launcher is found, or another study is using the directory.
        KeyboardInterrupt: the study was interrupted; no job is left running.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lock = Lock(directory)
    try:
        return _run(study, directory)
    finally:
        lock.release()


def _run(study: Study, directory: Path) -> int:
    for label, why in study.left_out:
        print(files.printable(f"left out: {label}: {why}"))
    code, progress = 0, StudyProgress(study.cells, directory)
    for number, cell in enumerate(study.cells, start=1):
        place = directory / "cells" / cell.directory
        ended, again = jobs.result(place), ", was complete"
        if ended is None or ended.code:
            progress.begin()
            watch = functools.partial(progress.look, number, cell)
            ended, again = jobs.run(cell, place, study.launcher, watch), ""
        how = f"failed: {ended.why}" if ended.code else f"{ended.seconds:.0f} s"
        if ended.code == STOPPED:
            how = "stopped; the same command resumes the study"
        seconds = None if ended.code or again else ended.seconds
        progress.end(number, cell, how + again, seconds)
        if ended.code == STOPPED and study.launcher == "mpirun":
            return STOPPED  # the next cells would receive a request to stop as well
        code = 1 if ended.code else code
    return code
