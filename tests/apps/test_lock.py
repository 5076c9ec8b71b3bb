"""Owners of a run directory, and a second run that holds, held or lost the directory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpikfac_apps.guard import lock
from mpikfac_apps.guard.lock import STALE, Lock

HOLDS = """
import sys, pathlib
from mpikfac_apps.guard.lock import Lock
Lock(pathlib.Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def take():
    """Return a function that takes locks; release the locks after the test."""
    taken = []

    def take(directory: Path, environ=None) -> Lock:
        taken.append(Lock(directory, environ or {}))
        return taken[-1]

    yield take
    for held in taken:
        held.release()


def edit(directory: Path, silent: float = 0, **changes: object) -> None:
    """Rewrite the lock file as a second run's file, last touched `silent` seconds ago."""
    path = directory / "lock"
    changes = {"token": "other", "host": "node5", "pids": "elsewhere"} | changes
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    os.utime(path, (time.time() - silent,) * 2)


def holder(directory: Path) -> dict[str, object]:
    return json.loads((directory / "lock").read_text())


def test_a_lock_is_one_file_until_it_is_released(take, tmp_path):
    """Oracle: the directory's content, and the name of the test's process."""
    held = take(tmp_path / "run", {"SLURM_JOB_ID": "4711"})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    named = holder(tmp_path / "run")
    assert (named["pid"], named["job"]) == (os.getpid(), "4711")
    held.release()
    assert not list((tmp_path / "run").iterdir())
    assert not held.lost
    take(tmp_path / "run")


def test_a_living_holder_is_named_and_kept(take, tmp_path):
    """Oracle: the lock's content; a holder on the same machine lives, for any time of silence."""
    take(tmp_path, {"PBS_JOBID": "12.head"})
    edit(tmp_path, silent=1000, host="node5", pids=holder(tmp_path)["pids"])
    before = holder(tmp_path)
    with pytest.raises(ValueError, match="is in use by process") as refused:
        take(tmp_path)
    text = str(refused.value)
    assert f"{tmp_path} is in use by process {os.getpid()} on node5, job 12.head" in text
    assert "last sign of life 1000 s ago; end that run" in text and "\n" not in text
    assert holder(tmp_path) == before
    assert os.listdir(tmp_path) == ["lock"]


def test_the_lock_of_a_killed_process_is_taken_at_once(take, tmp_path):
    """Oracle: a killed process, first a zombie (not yet waited for), then gone."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as run:
        assert run.stdout.readline() == "holds\n"
        with pytest.raises(ValueError, match=f"process {run.pid} on"):
            take(tmp_path)
        run.kill()
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        take(tmp_path).release()
        gone = dataclasses.replace(lock._this_run({}), pid=run.pid, born="1")
    lock._write(tmp_path / "lock", gone)
    take(tmp_path)
    assert os.listdir(tmp_path) == ["lock"]


def test_a_pid_that_is_used_again_is_not_the_holder(take, tmp_path):
    """Oracle: the test's process, with a different start time in the lock."""
    take(tmp_path)
    edit(tmp_path, born="1", pids=holder(tmp_path)["pids"])
    assert not take(tmp_path).lost


@pytest.mark.parametrize("silent", [STALE - 5, STALE + 5])
def test_a_holder_elsewhere_is_gone_once_it_is_silent(take, tmp_path, monkeypatch, silent):
    """Oracle: the dates of files; a clock of the host that is a day late has no effect."""
    take(tmp_path)
    edit(tmp_path, silent=silent)
    late = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: late)
    if silent > STALE:
        take(tmp_path)
        assert os.listdir(tmp_path) == ["lock"]
    else:
        with pytest.raises(ValueError, match="process .* on node5, started"):
            take(tmp_path)


@pytest.mark.parametrize(
    ("before", "now", "taken"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # two steps of one job
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"LSB_JOBID": "7"}, {"LSB_JOBID": "8"}, False),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}, False),
        ({}, {}, False),
    ],
)
def test_a_restarted_job_takes_its_lock_back_at_once(take, tmp_path, before, now, taken):
    """Oracle: the schedulers' variables; a holder on a second machine has just touched the lock."""
    take(tmp_path, before)
    edit(tmp_path)
    if taken:
        take(tmp_path, now)
    else:
        with pytest.raises(ValueError, match="is in use"):
            take(tmp_path, now)


@pytest.fixture
def touch():
    """Return a function that touches a file all the time, as a living holder does."""
    ended = threading.Event()
    threads = []

    def touch(path: Path) -> None:
        def beat() -> None:
            while not ended.wait(0.05):
                os.utime(path)

        threads.append(threading.Thread(target=beat))
        threads[-1].start()

    yield touch
    ended.set()
    for thread in threads:
        thread.join()


JOBS = [
    {"PBS_JOBID": "7.head"},
    {"LSB_JOBID": "7"},
    {"LSB_JOBID": "7", "LSB_JOBINDEX": "0"},
    {"LSB_JOBID": "7", "LSB_JOBINDEX": "3"},
]


@pytest.mark.parametrize("job", JOBS)
def test_a_second_run_in_one_job_is_refused(take, touch, tmp_path, monkeypatch, job):
    """Oracle: a holder on a second machine with the same job, touched all the time."""
    monkeypatch.setattr(lock, "LOOK_EVERY", 0.1)
    take(tmp_path, job)
    edit(tmp_path)
    before = holder(tmp_path)
    touch(tmp_path / "lock")
    with pytest.raises(ValueError, match="is in use by process .* on node5"):
        take(tmp_path, job)
    assert holder(tmp_path) == before


@pytest.mark.gate
@pytest.mark.parametrize("job", JOBS)
def test_a_restarted_job_waits_for_silence(take, tmp_path, monkeypatch, caplog, job):
    """Oracle: a holder on a second machine, touched a second before the end of the wait."""
    monkeypatch.setattr(lock, "LOOK_EVERY", 0.1)
    take(tmp_path, job)
    edit(tmp_path, silent=STALE - 1)
    take(tmp_path, job)
    assert holder(tmp_path)["host"] != "node5"
    (told,) = caplog.messages
    name = holder(tmp_path)["job"]
    assert f"names this job, {name}: waiting for a sign of life from process" in told


def test_the_jobs_of_an_array_have_names(take, tmp_path):
    """Oracle: LSF's notation of an element of an array; index 0 belongs to a job without array."""
    names = []
    for number, job in enumerate(JOBS[1:]):
        take(tmp_path / str(number), job)
        names.append(holder(tmp_path / str(number))["job"])
    assert names == ["7", "7", "7[3]"]


def test_the_lock_is_touched_while_it_is_held(take, tmp_path, monkeypatch):
    """Oracle: the lock's date, put back by hand."""
    monkeypatch.setattr(lock, "TOUCH_EVERY", 0.01)
    take(tmp_path)
    path = tmp_path / "lock"
    os.utime(path, (0, 0))
    while path.stat().st_mtime == 0:  # endless, if the lock were not touched
        time.sleep(0.01)


@pytest.mark.parametrize("error", [OSError, MemoryError, RuntimeError("can't start new thread")])
def test_a_failure_of_a_touch_is_made_good_by_the_next(take, tmp_path, monkeypatch, error):
    """Oracle: the lock's date, put back by hand after the third failure."""
    failures, read = iter([error] * 3), lock._read

    def failing(path):
        if failure := next(failures, None):
            raise failure
        os.utime(path, (0, 0))
        monkeypatch.setattr(lock, "_read", read)
        return read(path)

    monkeypatch.setattr(lock, "TOUCH_EVERY", 0.01)
    take(tmp_path)
    monkeypatch.setattr(lock, "_read", failing)
    while lock._read is failing or (tmp_path / "lock").stat().st_mtime == 0:
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["taken", "removed", "damaged"])
def test_a_lost_lock_is_noticed_and_left_alone(take, tmp_path, monkeypatch, how):
    """Oracle: the second run's lock, unchanged by the release."""
    monkeypatch.setattr(lock, "TOUCH_EVERY", 0.01)
    held = take(tmp_path)
    path = tmp_path / "lock"
    other = tmp_path / "other"
    other.write_text("{}" if how == "damaged" else path.read_text().replace(str(os.getpid()), "1"))
    os.replace(other, path)
    if how == "removed":
        path.unlink()
    while not held.lost:  # endless, if the loss were not noticed
        time.sleep(0.01)
    before = path.read_text() if path.exists() else None
    held.release()
    assert (path.read_text() if path.exists() else None) == before


@pytest.mark.parametrize("content", ["", "3", "{}", "{", '{"pid": 1}'])
def test_a_file_that_names_no_run_is_not_replaced(tmp_path, content):
    """Oracle: contents that no run writes."""
    (tmp_path / "lock").write_text(content)
    with pytest.raises(
        ValueError, match=r"lock does not name a run; remove it if no run uses the dir"
    ):
        Lock(tmp_path, {})
    assert os.listdir(tmp_path) == ["lock"]


def test_a_link_whose_answer_is_lost_counts(take, tmp_path, monkeypatch):
    """Oracle: a file server that makes a link, is asked again, and reports an existing link."""
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert not take(tmp_path).lost


def leave_behind(directory: Path, monkeypatch) -> Lock:
    """Return the lock of a run on a second machine; the run is long silent but alive."""
    there = dataclasses.replace(lock._this_run({}), pids="elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_this_run", lambda environ: there)
        held = Lock(directory, {})
    os.utime(directory / "lock", (time.time() - 2 * STALE,) * 2)
    return held


def attempt(directory: Path, held: list[Lock]) -> None:
    """Add the directory's lock to the held locks, unless the lock is refused."""
    try:
        held.append(Lock(directory, {}))
    except ValueError as error:
        assert "is in use" in str(error)


@contextmanager
def acting_before(moment: int, act, monkeypatch):
    """Run `act()` right before the body's step number `moment`; yield the count of steps."""
    steps = itertools.count(1)

    def step(call):
        def stepped(*args, **settings):
            if next(steps) == moment:
                act()
            return call(*args, **settings)

        return stepped

    with monkeypatch.context() as patch:
        files = ((os, "utime"), (os, "link"), (os, "replace"), (lock, "_read"), (Path, "unlink"))
        for owner, name in files:
            patch.setattr(owner, name, step(getattr(owner, name)))
        yield steps


@pytest.mark.parametrize("meanwhile", ["takes", "takes and releases", "the old one releases"])
def test_at_no_moment_can_two_runs_take_one_lock(tmp_path, monkeypatch, meanwhile):
    """Oracle: a single holder; before every step of the taker, a second run does its whole work."""
    for moment in itertools.count(1):
        directory, held = tmp_path / str(moment), []
        old = leave_behind(directory, monkeypatch)

        def act(directory=directory, held=held, old=old):
            if meanwhile == "the old one releases":
                old.release()
            else:
                attempt(directory, held)
            if meanwhile == "takes and releases" and held:
                held.pop().release()

        with acting_before(moment, act, monkeypatch) as steps:
            attempt(directory, held)
        (winner,) = held
        assert holder(directory)["token"] == winner._holder.token
        winner.release()
        old.release()
        assert not list(directory.iterdir())
        if next(steps) <= moment:  # the taker had ended
            break
    assert moment > 5


def test_at_no_moment_does_a_release_remove_the_lock_of_another(tmp_path, monkeypatch):
    """Oracle: the lock of a run that takes the lock right before each step of the old release."""
    for moment in itertools.count(1):
        directory, held = tmp_path / str(moment), []
        old = leave_behind(directory, monkeypatch)
        with acting_before(moment, lambda d=directory, h=held: attempt(d, h), monkeypatch) as steps:
            old.release()
        if held:
            assert holder(directory)["token"] == held.pop()._holder.token
        else:
            attempt(directory, held)
            held.pop().release()
            assert not list(directory.iterdir())
        if next(steps) <= moment:
            break
    assert moment > 4


@pytest.mark.gate
def test_of_many_takers_one_wins(tmp_path, monkeypatch):
    """Oracle: a single holder among runs that start together, in 30 rounds."""
    for round_ in range(30):
        directory = tmp_path / str(round_)
        old = leave_behind(directory, monkeypatch)
        held, start = [], threading.Barrier(6)

        def together(directory=directory, held=held, start=start):
            start.wait()
            attempt(directory, held)

        threads = [threading.Thread(target=together) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = held
        winner.release()
        old.release()
        assert not list(directory.iterdir())


def test_a_run_that_died_taking_or_releasing_is_replaced_too(take, tmp_path, monkeypatch):
    """Oracle: the files of runs killed while they had the right to replace the lock."""
    old = leave_behind(tmp_path, monkeypatch)
    dead = dataclasses.replace(lock._this_run({}), token="dead", born="1")
    right = tmp_path / f"lock.{old._holder.token}"
    lock._write(right, dead)
    os.link(right, f"{right}.dead")
    held = take(tmp_path)
    assert holder(tmp_path)["token"] == held._holder.token
    assert os.listdir(tmp_path) == ["lock"]
