"""Write the run directory on rank 0: settings, environment, log, metrics, progress.

RUN/config.yaml  environment.json  log.txt  metrics.jsonl  checkpoints/
[stages.json  trace.json.gz]  [tracking_id  tensorboard/  wandb/  mlflow/]
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import logging.handlers
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from mpikfac import files
from mpikfac_apps.options.run import RunOptions
from mpikfac_apps.tracking.metrics_file import MetricsFile, state_on_disk
from mpikfac_apps.tracking.tracker import Trackers

LINE_EVERY = 30.0  # seconds between two lines of progress in a log
BAR_EVERY = 0.5  # seconds between two updates of the loss on a terminal
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")

log = logging.getLogger("mpikfac.train")


class Screen(logging.Handler):
    """Print log records above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        with suppress(OSError):  # for example on a full disk
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()  # so that users can read the log of a running batch job


class Printable(logging.Formatter):
    """Format records without control characters, because parts of them can come from files."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a log record, without control characters."""
        return files.printable_lines(super().format(record))


class LogFile(logging.Handler):
    """Append log records to a file; create it again if it was renamed or removed.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = self._opened(path)
        self._path = files.anchored(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with suppress(OSError):  # for example on a full disk, or because the folder has moved
            if not files.names(self._path, self._file):
                self._file = self._opened(self._path)
        with suppress(OSError):  # the line stays in the buffer, and is written later
            self._file.write(line)
            self._file.flush()

    def _opened(self, path: Path) -> io.BufferedWriter:
        return io.BufferedWriter(files.writing(path, "end"))


def start_log(writer: str = "") -> logging.handlers.MemoryHandler:
    """Print the log; the returned handler keeps it for log.txt, which is opened later.

    Args:
        writer: the prefix of each printed line.
    """
    library = logging.getLogger("mpikfac")
    library.setLevel(logging.INFO)
    early_log = logging.handlers.MemoryHandler(capacity=1, flushLevel=logging.INFO)
    screen = Screen()
    screen.setFormatter(Printable(f"{writer}%(message)s"))
    library.handlers[:] = [screen, early_log]  # remove handlers of an earlier run in the process
    return early_log


class Record:
    """The open run directory.

    Args:
        config: all options, for config.yaml.
        early_log: the handler from `start_log`; from now on, it writes to the directory's log.txt.
        trackers: the experiment trackers, which also receive the values of metrics.jsonl.
        kept_bytes: see `MetricsFile`.
        waiting: see `MetricsFile`.
    """

    def __init__(
        self,
        options: RunOptions,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        early_log: logging.handlers.MemoryHandler,
        trackers: Trackers,
        kept_bytes: int = 0,
        waiting: str = "",
    ) -> None:
        path = Path(options.run_dir)
        path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dict(config), sort_keys=False)
        files.write_text(path / "config.yaml", text)
        files.write_text(path / "environment.json", json.dumps(environment, indent=1) + "\n")
        file = LogFile(path / "log.txt")
        file.setFormatter(Printable("%(asctime)s %(message)s"))
        early_log.setTarget(file)
        early_log.flush()
        self._metrics = MetricsFile(path / "metrics.jsonl", kept_bytes, waiting)
        self._trackers = trackers

    def row(self, step: int, **values: float) -> None:
        """Append the finite values, rounded to 6 digits, as a line to metrics.jsonl.

        Lines wait in memory while the disk is full.
        """
        values = {key: value for key, value in values.items() if math.isfinite(value)}
        short = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in values.items()}
        self._metrics.add(json.dumps({"step": step, **short}))
        self._trackers.add(step, values)

    def state(self) -> dict[str, int | str]:
        """Return items for a checkpoint, from which a restart continues metrics.jsonl."""
        return self._metrics.state()

    def close(self) -> None:
        """Close the trackers; metrics.jsonl stays open."""
        self._trackers.close()


def state_of_a_lost_rank(run_dir: str) -> dict[str, int | str]:
    """Return what `Record.state` would return, if the rank that wrote metrics.jsonl is lost.

    Raises:
        OSError: metrics.jsonl cannot be opened.
    """
    return state_on_disk(Path(run_dir) / "metrics.jsonl")


def start_anew(run_dir: Path) -> None:
    """Rename the metrics.jsonl of a run that was killed before its first checkpoint was complete.

    Raises:
        ValueError: the run had complete checkpoints, so a start at step 0 would be a mistake.
    """
    metrics, folder = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    if not os.path.lexists(metrics) or not metrics.lstat().st_size:
        return
    if os.path.lexists(folder) and not any(folder.glob(".step-*.partial")):
        raise ValueError(
            f"{metrics} belongs to a run with checkpoints, but {folder} has none; put a checkpoint "
            f"back, or delete metrics.jsonl to start at step 0"
        )
    names = (run_dir / f"metrics-{number}.jsonl" for number in itertools.count(1))
    aside = metrics.rename(next(name for name in names if not os.path.lexists(name)))
    log.warning("no checkpoint: the run starts at step 0, and the earlier metrics are in %s", aside)


class RunProgress:
    """Show the progress of a run: a bar on a terminal, otherwise a line in the log every 30 s.

    Args:
        first: the number of steps that were completed before this start.
        last: the number of steps of the whole run.
        epochs: returns the number of epochs before a step; the estimate of the remaining time
            assumes that all epochs take the same time.
    """

    def __init__(self, first: int, last: int, epochs: Callable[[int], float]) -> None:
        self.first, self.last, self.done = first, last, 0
        self.epochs = epochs
        self.began = self.shown = time.perf_counter()
        self.bar = None
        if on_terminal():
            self.bar = tqdm(total=last, initial=first, unit="step", ncols=100)

    def advance(self, describe: Callable[[], str]) -> None:
        """Count a step, and show `describe()` if an update is due."""
        self.done += 1
        now = time.perf_counter()
        due = now - self.shown >= (BAR_EVERY if self.bar is not None else LINE_EVERY)
        if due:
            self.shown = now
        if self.bar is not None:
            if due:
                self.bar.set_postfix_str(describe(), refresh=False)
            self.bar.update()
        elif due:
            start, here, end = map(self.epochs, (self.first, self.first + self.done, self.last))
            seconds = (now - self.began) / (here - start) * (end - here)
            log.info("%s, %s to go", describe(), tqdm.format_interval(seconds))

    def close(self) -> None:
        """Close the progress bar; its last state stays on the terminal."""
        if self.bar is not None:
            self.bar.close()


def on_terminal() -> bool:
    """Return whether stderr is a terminal.

    Under mpirun, the streams of a rank do not show this: Open MPI makes stderr a pipe, and stdout
    a terminal even in a batch job. In this case, the stderr of mpirun itself is checked.
    """
    if sys.stderr.isatty() or not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return sys.stderr.isatty()
    try:
        target = os.readlink(f"/proc/{os.getppid()}/fd/2")
    except OSError:
        return False
    return target.startswith(("/dev/pts/", "/dev/tty"))
