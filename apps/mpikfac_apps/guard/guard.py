"""Guard a run: lock its directory, stop it before its job ends, and abort it if it hangs."""

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
        requests: requests to this rank to save or stop, from signals, control files and clocks.
        clock: counts seconds, except those for which this rank is stopped, by SIGSTOP for example.
    """

    requests: Requests

    def __init__(self, comm: mpikfac.comm.Comm, options: RunOptions, watchdog: Watchdog) -> None:
        """Lock the run directory, and let the watchdog write its reports there.

        Collective over: comm.

        Raises:
            UserError: another run uses the directory, or the directory cannot be written.
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
            raise ValueError("it is a file; pass a directory")
        self._lock = Lock(self._directory)
        try:
            check_directory(self._directory, resume)
        except ValueError:
            self._lock.release()
            raise
        reports.set_aside(self._directory / "hang")

    def enter(self, phase: str, step: int) -> None:
        """Record the start of a phase of the run; the watchdog limits the time of each phase.

        Raises:
            UserError: another run has taken over the directory, or the directory or its lock is
                gone, so this run must stop writing.
        """
        self.phase = phase, step
        self._watchdog.enter(phase, step)
        if self._lock and phase == "checkpoint":
            self._lock.look()  # so that a directory that was moved is not created again
        if self._lock and self._lock.lost:
            raise mpikfac.UserError(self._lock.lost)

    def begin_write(self, step: int, unfinished: Callable[[], bool]) -> None:
        """Record the start of a checkpoint that is written in the background."""
        self._watchdog.begin_write(step, unfinished)

    def end_write(self) -> None:
        """Record that the checkpoint has been written, or has failed."""
        self._watchdog.end_write()

    def where(self) -> str:
        """Return the current phase and stage of the run, such as `step 12, reduce gradients`."""
        phase, step = self.phase
        place = f"step {step}" if phase == "step" else f"{phase} at step {step}"
        return ", ".join(filter(None, [place, self.stage()]))

    def inherit(self) -> None:
        """Remove the lock that a lost rank 0 held, so that a new rank 0 can lock the directory."""
        (self._directory / "lock").unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; remove empty folders, and the run directory if it is empty."""
        self._watchdog.follow(self._limit)
        self._watchdog.enter("end", self.phase[1])
        self.requests.close()
        if self._lock:
            self._lock.release()
        for empty in ("hang", "control", "."):
            with suppress(OSError):  # only the rank that closes last finds the folders empty
                (self._directory / empty).rmdir()


def check_directory(run_dir: Path, resume: str) -> None:
    """Check that the run directory is empty, except for the lock, unless `resume` is "auto".

    The program's folders in the directory must not be links, so that nothing is written outside.

    Raises:
        ValueError: the directory contains files or such links.
    """
    for path in (run_dir / name for name in FOLDERS):
        if path.is_symlink():
            raise ValueError(f"{path} is a link; use a folder, or make {run_dir} itself the link")
    names = set(os.listdir(run_dir)) - {"lock"}
    if resume != "auto" and names:
        raise ValueError("it is not empty; use another one, or resume=auto to continue the run")
