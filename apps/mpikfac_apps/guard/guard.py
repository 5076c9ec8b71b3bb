"""Guard a run: lock the directory, end the run in time, and end a run that hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import mpikfac
from mpikfac_apps.guard import reports
from mpikfac_apps.guard.lock import Lock
from mpikfac_apps.guard.requests import Requests, end_of_job
from mpikfac_apps.guard.watchdog import Watchdog
from mpikfac_apps.options.run import RunOptions

BEGAN = time.time()
FOLDERS = ("checkpoints", "control", "hang", "tensorboard", "wandb", "mlflow")


class Guard:
    """The lock, the requests and the watchdog of a run.

    Attributes:
        requests: requests to this rank, from signals, control files and the time of day.
        clock: seconds in which this rank runs; stopped time does not count.
    """

    requests: Requests

    def __init__(self, comm: mpikfac.comm.Comm, options: RunOptions, watchdog: Watchdog) -> None:
        """Open the run directory; from now on the watchdog reports to the directory.

        Collective over: comm.

        Raises:
            UserError: a second run uses the directory, or the directory cannot be written.
        """
        self.phase = "start-up", 0
        self.stage: Callable[[], str] = lambda: ""  # replaced by the trainer's stage
        self.clock = watchdog.clock
        self._watchdog, self._limit = watchdog, options.watchdog_timeout
        self._directory = Path(options.run_dir)
        self._lock: Lock | None = None
        leads = comm.rank == 0
        with mpikfac.comm.together(comm, f"run_dir={options.run_dir}"):
            end = end_of_job(options.max_time, os.environ, BEGAN) if leads else None
            if leads:
                self._take_directory(options.resume)
            minutes = options.checkpoint_minutes if leads else None
            control = self._directory / "control" if leads else None
            self.requests = Requests(control, end=end, every_minutes=minutes, clock=self.clock)
        with mpikfac.comm.together(comm, f"run_dir={options.run_dir}"):
            files = reports.Reports(self._directory / "hang", comm.rank, comm.size)
        watchdog.follow(self._limit, lambda: self.stage(), files)

    def _take_directory(self, resume: str) -> None:
        if self._directory.exists() and not self._directory.is_dir():
            raise ValueError("it is a file; give a directory")
        self._lock = Lock(self._directory)
        try:
            check_directory(self._directory, resume)
        except ValueError:
            self._lock.release()
            raise
        reports.set_aside(self._directory / "hang")

    def enter(self, phase: str, step: int) -> None:
        """Note the beginning of a phase; the watchdog allows each phase its own time.

        Raises:
            UserError: a second run has taken the directory, or the directory is gone; writing has
                to end.
        """
        self.phase = phase, step
        self._watchdog.enter(phase, step)
        if self._lock and phase == "checkpoint":
            self._lock.look()  # nothing is made anew in the place of a directory that has moved
        if self._lock and self._lock.lost:
            raise mpikfac.UserError(self._lock.lost)

    def begin_write(self, step: int, unfinished: Callable[[], bool]) -> None:
        """Note the beginning of a checkpoint that is written while steps go on."""
        self._watchdog.begin_write(step, unfinished)

    def end_write(self) -> None:
        """Note the end of the checkpoint."""
        self._watchdog.end_write()

    def where(self) -> str:
        """Return the run's phase and stage, such as `step 12, reduce gradients`."""
        phase, step = self.phase
        place = f"step {step}" if phase == "step" else f"{phase} at step {step}"
        return ", ".join(filter(None, [place, self.stage()]))

    def inherit(self) -> None:
        """Remove the lost rank 0's lock, to let a new rank 0 take the directory."""
        (self._directory / "lock").unlink(missing_ok=True)

    def close(self) -> None:
        """Release the directory, and remove empty folders and an empty run directory."""
        self._watchdog.follow(self._limit)
        self._watchdog.enter("end", self.phase[1])
        self.requests.close()
        if self._lock:
            self._lock.release()
        for empty in ("hang", "control", "."):
            with suppress(OSError):  # folders are empty for the last rank, if at all
                (self._directory / empty).rmdir()


def check_directory(run_dir: Path, resume: str) -> None:
    """Raise ValueError if the directory holds files of an earlier run, unless the run resumes.

    Folders of the directory must be no links: the run writes nothing outside the directory.
    """
    for path in (run_dir / name for name in FOLDERS):
        if path.is_symlink():
            raise ValueError(f"{path} is a link; put a folder there, or make {run_dir} the link")
    names = set(os.listdir(run_dir)) - {"lock"}
    if resume != "auto" and names:
        raise ValueError("it is not empty; give another one, or resume=auto to go on with it")
