"""Allow one run per directory: `RUN/lock` names the run, which touches the file while it runs.

The file is created as a hard link, so it appears together with its content, even on NFS. The run
that it names is the holder of the lock. A run that replaces or removes `lock` must first create the
link `lock.TOKEN`, where TOKEN is the token of the holder. If several runs find that the holder is
dead, only one of them can create this link. No run removes a lock that has changed since the run
read it.

If the holder has the same job name as this run, it is either the same job's run before a restart,
or another run in the same job. Only Slurm counts restarts. With PBS and LSF, a run waits until the
holder touches the file again, or has not done so for a minute.

All functions run on one rank. Collective over: none.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mpikfac import files

TOUCH_EVERY = 10.0  # seconds
STALE = 60.0  # seconds without a touch after which a holder on another host is considered dead
LOOK_EVERY = 0.5  # seconds between two checks whether a holder has touched the file

log = logging.getLogger("mpikfac.train")


@dataclass(frozen=True)
class Holder:
    """The run that a lock file names.

    Attributes:
        token: unique to the run.
        pids: identifies the boot and the process namespace; process ids of two runs can be compared
            only if this is equal.
        born: the start time of the process, in ticks since boot, because process ids are reused.
        job: the scheduler's name for the job, or "".
        attempt: the number of times Slurm has restarted the job; "" if the scheduler does not
            count.
    """

    token: str
    host: str
    pid: int
    pids: str
    born: str
    job: str
    attempt: str
    started: str


class Lock:
    """Hold a directory exclusively for a run, until `release` or the end of the process.

    Attributes:
        lost: why the run no longer holds the lock: another run took it, or the lock is gone. It is
            "" while the run holds the lock; a loss is noticed within 10 s.

    Raises:
        ValueError: another run uses the directory; the message names that run and a remedy.
        OSError: the lock file cannot be written.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.lost = ""
        self._path = directory / "lock"
        self._holder = _this_run(environ)
        self._released = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".lock-{self._holder.token}"
        try:
            _write(draft, self._holder)
            self._take(self._path, draft)
        finally:
            draft.unlink(missing_ok=True)
        self._heart = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._heart.start()

    def release(self) -> None:
        """Remove the lock if it still names this run."""
        self._released.set()
        self._heart.join()
        right = _right_to_replace(self._path, self._holder)
        with suppress(OSError):  # a lock that is left behind names a dead process
            os.utime(self._path)  # also touches the link `right`
            os.link(self._path, right)
            if self._is_named_in(right):
                self._path.unlink()
            right.unlink()

    def _take(self, path: Path, draft: Path) -> None:
        """Create a hard link `path` to the draft; raise ValueError if a live run holds `path`."""
        seen = None
        while True:
            with suppress(FileExistsError):
                os.link(draft, path)
                return
            try:
                holder, touched = _read(path)
            except FileNotFoundError:  # it was just released
                time.sleep(0.01)
                continue
            if holder == self._holder:  # the file server's reply to link() was lost
                return
            # Both times come from the file server, because the hosts' clocks can differ.
            silent = draft.stat().st_mtime - touched
            if _may_be_restarted(holder, self._holder, silent) and seen in (None, touched):
                if seen is None:
                    log.warning(_waiting(path, holder))
                seen = touched
                time.sleep(LOOK_EVERY)
                os.utime(draft)
                continue
            if not _is_gone(holder, self._holder, silent):
                raise ValueError(_refusal(path, holder, silent))
            right = _right_to_replace(path, holder)
            self._take(right, draft)  # also replaces the link of a run that died after creating it
            with suppress(FileNotFoundError):
                if _read(path)[0] == holder:
                    os.replace(right, path)
                    return
            right.unlink()

    def _beat(self) -> None:
        while not self.lost and not self._released.wait(TOUCH_EVERY):
            self.look()

    def look(self) -> None:
        """Touch the lock, or record why it is lost."""
        with suppress(Exception):  # storage or memory might be available again at the next attempt
            if self._is_named_in(self._path):
                os.utime(self._path)
            elif os.path.lexists(self._path):
                self.lost = f"run_dir={self._path.parent} was taken over by another run"
            else:
                self.lost = (
                    f"run_dir={self._path.parent} was moved or deleted, or has lost its lock; "
                    "--resume auto continues in the directory's new location"
                )

    def _is_named_in(self, path: Path) -> bool:
        try:
            return _read(path)[0] == self._holder
        except (FileNotFoundError, files.Refused, ValueError):
            return False


def _this_run(environ: Mapping[str, str]) -> Holder:
    token = uuid.uuid4().hex
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Holder(
        token=token,
        host=platform.node(),
        pid=os.getpid(),
        pids=f"{boot} {os.readlink('/proc/self/ns/pid')}",
        born=born(os.getpid()),
        job=_job(environ),
        attempt=environ.get("SLURM_RESTART_COUNT", "0") if environ.get("SLURM_JOB_ID") else "",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _job(environ: Mapping[str, str]) -> str:
    """Return the scheduler's name for the job, or ""; the jobs of an array have separate names."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if job := environ.get(name):
            index = environ.get("LSB_JOBINDEX", "0") if name == "LSB_JOBID" else "0"
            return job if index == "0" else f"{job}[{index}]"
    return ""


def born(pid: int) -> str:
    """Return the start time of a process in ticks since boot, or "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # the name in parentheses can contain spaces
    return "" if state in "ZX" else fields[18]


def _is_gone(holder: Holder, claimant: Holder, silent: float) -> bool:
    if holder.pids == claimant.pids:
        return born(holder.pid) != holder.born
    restarted = holder.job == claimant.job != "" and holder.attempt != claimant.attempt
    return restarted or silent > STALE


def _may_be_restarted(holder: Holder, claimant: Holder, silent: float) -> bool:
    """Return whether the holder may be this job's run before a restart, or another run in this job.

    If restarts are not counted, only a touch by the holder shows that it is another, live run.
    """
    elsewhere = holder.pids != claimant.pids and silent <= STALE
    return elsewhere and holder.job == claimant.job != "" and not claimant.attempt


def _right_to_replace(path: Path, holder: Holder) -> Path:
    return path.with_name(f"{path.name}.{holder.token}")


def _refusal(path: Path, holder: Holder, silent: float) -> str:
    job = f", job {holder.job}" if holder.job else ""
    return (
        f"{path.parent} is in use by process {holder.pid} on {holder.host}{job}, started "
        f"{holder.started}, last sign of life {max(silent, 0):.0f} s ago; end that run (if it was "
        f"killed, wait {STALE:.0f} s) or use another directory"
    )


def _waiting(path: Path, holder: Holder) -> str:
    return (
        f"{path} names this job, {holder.job}: waiting for a sign of life from process "
        f"{holder.pid} on {holder.host}, at most {STALE:.0f} s"
    )


def _write(path: Path, holder: Holder) -> None:
    with files.writing(path, "new") as file:
        files.write_all(file, json.dumps(dataclasses.asdict(holder)).encode() + b"\n", path)
        os.fsync(file.fileno())


def _read(path: Path) -> tuple[Holder, float]:
    """Return the run that a lock file names, and the time at which the file was last touched."""
    with files.reading(path, files.SMALL) as file:
        text, touched = file.read(files.SMALL), os.fstat(file.fileno()).st_mtime
    with suppress(ValueError, TypeError):
        holder = Holder(**files.json_of(text))
        if _names_a_run(holder):
            return holder, touched
    raise ValueError(f"{path} does not name a run; remove it if no run uses the directory")


def _names_a_run(holder: Holder) -> bool:
    """Return whether all fields have the right types, and the token can be part of a file name."""
    texts = {key: value for key, value in dataclasses.asdict(holder).items() if key != "pid"}
    typed = type(holder.pid) is int and all(isinstance(value, str) for value in texts.values())
    return typed and re.fullmatch(r"[\w-]{1,64}", holder.token) is not None
