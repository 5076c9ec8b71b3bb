"""Signals, control files and the clock, and the resulting requests to a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mpikfac_apps import guard
from mpikfac_apps.guard.requests import LAUNCHER, RESERVE, SIGNALS, Requests, end_of_job


@pytest.fixture
def make():
    """Return a function that makes requests; restore the handlers after the test."""
    made = []

    def make(control=None, *, end=None, every_minutes=None, clock=None):
        clock = clock or guard.requests.time.monotonic
        made.append(Requests(control, end=end, every_minutes=every_minutes, clock=clock))
        return made[-1]

    yield make
    for requests in made:
        requests.close()


class Clock:
    """Replaces the module's clock: `now` is unix time; `monotonic` began an hour earlier."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - 1e9 + 3600


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("mpikfac_apps.guard.requests.time", clock)
    return clock


def test_a_stop_of_the_process_is_no_pause_between_two_steps(make, clock):
    """Oracle: unix time goes on for two minutes, and the clock of the process does not."""
    requests = make(end=clock.now + 200, clock=lambda: 0.0)
    assert not requests.stop
    clock.now += 120
    assert not requests.stop
    clock.now += 20
    assert requests.reason == "" and requests.stop and requests.reason == "end of job in 60 s"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_asks_for_the_end_once_and_by_its_name(make, name):
    """Oracle: the signal sent to this process, twice, and later another signal."""
    requests = make()
    assert not requests.stop and requests.reason == ""
    for number in (getattr(signal, name), getattr(signal, name), signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert requests.stop and not requests.checkpoint
    assert requests.reason == name


def test_close_brings_the_former_handlers_back(make):
    """Oracle: the handlers before."""
    before = [signal.getsignal(number) for number in SIGNALS]
    requests = make()
    assert [signal.getsignal(number) for number in SIGNALS] != before
    requests.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before


LEAVES = """
import sys, time
from mpikfac_apps.guard.requests import Requests
requests = Requests(None, end=None, every_minutes=None)
print("polls", flush=True)
while not requests.stop:
    time.sleep(0.001)
if sys.argv[1] == "ignores":
    requests.ignore_signals()
    requests.close()
class Late:
    def __del__(self):
        print("ends", flush=True)
        sys.stdin.readline()
kept = Late()
kept.itself = kept  # freed when the interpreter has nearly ended
"""


@pytest.mark.parametrize(("how", "code"), [("ignores", 0), ("obeys", -signal.SIGUSR1)])
def test_a_late_signal_does_no_harm_once_signals_are_ignored(how, code):
    """Oracle: the exit code of a process that gets a signal while the interpreter ends."""
    command = [sys.executable, "-c", LEAVES, how]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as run:
        assert run.stdout.readline() == "polls\n"
        for _ in range(2):
            run.send_signal(signal.SIGUSR1)
        assert run.stdout.readline() == "ends\n"
        run.send_signal(signal.SIGUSR1)
    assert run.returncode == code


def test_system_calls_go_on_after_a_signal():
    """Oracle: a read in the C library, which the signal interrupts or not."""
    program = """
import ctypes, os, signal, threading, time
from mpikfac_apps.guard.requests import Requests
Requests(None, end=None, every_minutes=None)
get, put = os.pipe()
def later():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.2)  # else there is something to read before the signal arrives
    os.write(put, b"x")
threading.Timer(0.2, later).start()
print(ctypes.CDLL(None, use_errno=True).read(get, ctypes.create_string_buffer(1), 1))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


@pytest.mark.parametrize("name", ["checkpoint", "stop"])
def test_a_control_file_is_obeyed_and_removed(make, clock, tmp_path, name):
    """Oracle: the file system, and a clock that stands until a second is over."""
    requests = make(tmp_path / "control")
    assert not requests.stop
    file = tmp_path / "control" / name
    file.touch()
    assert not getattr(requests, name), "looked twice in a second"
    clock.now += 1
    assert (requests.stop, requests.checkpoint) == (name == "stop", name == "checkpoint")
    assert requests.reason == f"control/{name}"
    assert not file.exists()


def test_a_checkpoint_is_asked_for_until_it_is_saved(make, clock, tmp_path):
    """Oracle: the order of requests; the later SIGTERM is the reason for the remaining request."""
    requests = make(tmp_path)
    (tmp_path / "checkpoint").touch()
    assert requests.checkpoint and requests.checkpoint
    os.kill(os.getpid(), signal.SIGTERM)
    requests.saved(1.0)
    assert not requests.checkpoint and requests.stop
    assert requests.reason == "SIGTERM"
    (tmp_path / "checkpoint").touch()
    clock.now += 1
    assert requests.checkpoint


def test_a_control_directory_that_cannot_be_read_asks_for_nothing(make, clock, tmp_path):
    """Oracle: a missing directory, and a directory in a file's place."""
    requests = make(tmp_path / "control")
    (tmp_path / "control").rmdir()
    assert not requests.stop
    (tmp_path / "control" / "stop").mkdir(parents=True)
    clock.now += 1
    assert not requests.stop


@pytest.mark.parametrize(
    ("every", "waits"), [(15, (2, 15, 15)), (2, (2, 2, 2)), (0.5, (0.5, 0.5, 0.5))]
)
def test_minutes_pass_between_two_checkpoints(make, clock, every, waits):
    """Oracle: by the clock, 2 minutes to the first, or fewer, and from then on the interval."""
    requests = make(every_minutes=every)
    for minutes in waits:
        clock.now += 60 * minutes - 1
        assert not requests.checkpoint
        clock.now += 1
        assert requests.checkpoint and not requests.stop
        assert requests.reason == f"{minutes} minutes"
        requests.saved(3.0)


def test_the_launcher_asks_for_the_end_in_a_file(make, clock, tmp_path, monkeypatch):
    """Oracle: the file system, and a clock; a rank on another host has no such directory."""
    monkeypatch.setenv(LAUNCHER, str(tmp_path / "job"))
    requests = make()
    assert not requests.stop
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "stop").write_text("Ctrl-C")
    assert not requests.stop, "looked twice in a second"
    clock.now += 1
    assert requests.stop and requests.reason == "Ctrl-C"
    assert (tmp_path / "job" / "stop").exists(), "other ranks look, too"


@pytest.mark.parametrize(
    ("writes", "pause", "margin"),
    [([], 1, RESERVE + 1), ([4, 30, 5], 1, RESERVE + 61), ([30], 100, RESERVE + 160)],
)
def test_the_end_is_asked_for_in_time_for_two_slow_checkpoints(make, clock, writes, pause, margin):
    """Oracle: 2 x the slowest write + the longest pause between polls + 60 s, by hand."""
    end = clock.now + 2000
    requests = make(end=end)
    clock.now += 1000  # of start-up: no pause between two polls
    assert not requests.stop
    clock.now += pause
    for seconds in writes:
        requests.saved(seconds)
    while not requests.stop:
        clock.now += 1
    assert end - clock.now == margin
    assert requests.reason == f"end of job in {margin:.0f} s"


def test_a_poll_costs_nearly_nothing(make, clock, tmp_path, monkeypatch):
    """Oracle: the number of directory listings of 1,000 polls in 10 s."""
    requests, looks = make(tmp_path), []
    monkeypatch.setattr("os.listdir", lambda path: looks.append(path) or [])
    for _ in range(1000):
        assert not requests.stop and not requests.checkpoint
        clock.now += 0.01
    assert len(looks) in (10, 11)


NOW = 1_700_000_000


@pytest.mark.parametrize(
    ("minutes", "given", "end"),
    [
        (None, None, None),
        (None, "", None),
        (10, None, NOW + 600),
        (None, f"{NOW + 60}", NOW + 60),
        (10, f"{NOW + 60}", NOW + 60),
        (10, f"{NOW + 6000}", NOW + 600),
    ],
)
def test_a_job_ends_at_the_earlier_of_two_times(minutes, given, end):
    """Oracle: the minimum by hand."""
    environ = {} if given is None else {"SLURM_JOB_END_TIME": given}
    assert end_of_job(minutes, environ, NOW) == end


@pytest.mark.parametrize("given", ["soon", "nan", "inf", "-1", "0", f"{NOW}", "12:00", "9" * 400])
def test_a_bad_end_of_the_job_is_refused(given):
    """Oracle: values that are no future time."""
    with pytest.raises(ValueError, match=f"SLURM_JOB_END_TIME={given} must be a unix time after"):
        end_of_job(10, {"SLURM_JOB_END_TIME": given}, NOW)
