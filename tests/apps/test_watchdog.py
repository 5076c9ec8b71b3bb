"""Jobs without progress, slow jobs, and the files that both leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from mpikfac_apps.guard.reports import Reports, set_aside, summary
from mpikfac_apps.guard.watchdog import Watchdog
from support.launch import launch
from support.pace import PACE, paced

HANGS = """
import ctypes, os, re, signal, sys, time
from pathlib import Path
import mpikfac
from mpikfac_apps.guard.requests import Requests
from mpikfac_apps.guard.reports import Reports, set_aside
from mpikfac_apps.guard.watchdog import Watchdog

def sleep(): time.sleep(600)
def stop(): os.kill(os.getpid(), signal.SIGSTOP)
def hold_the_gil(): re.match("(a+)+b", "a" * 99)

directory, how = Path(sys.argv[1]), globals()[sys.argv[2]]
comm, trace = mpikfac.world(), mpikfac.Trace()
Requests(None, end=None, every_minutes=None)  # SIGTERM kills no rank then
if comm.rank == 0:
    set_aside(directory)
comm.Barrier()
reports, limit = Reports(directory, comm.rank, comm.size), int(sys.argv[3])
watchdog = Watchdog(reports, limit, lambda: trace.current)
for step in range(3):
    watchdog.enter("step", step)
    with trace.stage("precondition"):
        if (step, comm.rank) == (2, 1):
            how()
    with trace.stage("reduce gradients"):
        comm.Barrier()
"""
WAITING = 'waiting in "reduce gradients" of step 2'
SILENT = "rank 1 silent (stopped, holding the GIL, or at its end)"


@pytest.mark.gate
@pytest.mark.parametrize(
    ("how", "ranks", "where"),
    [
        ("sleep", 3, f'rank 1 on HOST in "precondition" of step 2; ranks 0, 2 {WAITING}'),
        *(
            pytest.param(how, 2, f"{SILENT}; rank 0 on HOST {WAITING}", marks=pytest.mark.slow)
            for how in ("stop", "hold_the_gil")
        ),
    ],
)
def test_a_job_that_hangs_ends_with_one_line_and_all_stacks(tmp_path, how, ranks, where):
    """Oracle: the place written into the program; a stopped process has no stack."""
    hang = tmp_path / "hang"
    hang.mkdir()
    for old in ("summary.txt", "rank-1.txt", "rank-9.txt"):
        (hang / old).write_text('{"stage": "of an earlier start"}\n')
    program = tmp_path / "program.py"
    program.write_text(HANGS)
    limit = round(paced(2))
    job = launch(ranks, str(program), str(hang), how, str(limit))
    assert job.returncode == 1
    (line,) = [line for line in job.stderr.splitlines() if "mpikfac" in line]
    host = json.loads((hang / "rank-0.txt").read_text().splitlines()[0])["host"]
    where = where.replace("HOST", host)
    assert line == f"mpikfac: no progress for {limit} s: {where}; stacks in {hang}"
    assert line.endswith((hang / "summary.txt").read_text().strip())
    for rank in range(ranks):
        stack = (hang / f"rank-{rank}.txt").read_text()
        if (how, rank) != ("stop", 1):
            assert (f"in {how}" if rank == 1 else "program.py") in stack
            assert stack.count("most recent call first") == 2, "twice, or not of all threads"
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(program) in " ".join(process.info["cmdline"] or [])
    ]
    assert not psutil.wait_procs(ranks, timeout=paced(30))[1]  # killed, they may not be gone yet
    (kept,) = tmp_path.glob("hang-*")
    assert len(list(kept.iterdir())) == 3


ALONE = f"""
import ctypes, os, sys, time
from pathlib import Path
from mpikfac_apps.guard.reports import Reports
from mpikfac_apps.guard.watchdog import Watchdog
hang, PACE = Path(sys.argv[1]), {PACE}
def watched(limit):
    return Watchdog(Reports(hang, 0, 1), limit, lambda: "decompose")
"""


def alone(hang: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Return the end of a single process without MPI that runs `body`."""
    command = [sys.executable, "-c", ALONE + textwrap.dedent(body), str(hang)]
    return subprocess.run(command, capture_output=True, text=True, timeout=paced(240))


@pytest.mark.gate
def test_what_may_last_longer_is_not_ended(tmp_path):
    """Oracle: twice the limit of a step, in evaluation until C's thread ends a step; GIL held."""
    body = """
    watchdog = watched(0.5 * PACE)
    ctypes.PyDLL(None).usleep(int(1e6 * PACE))
    watchdog.enter("step", 0)
    ctypes.PyDLL(None).usleep(int(1e6 * PACE))
    for step in range(1, 40):
        watchdog.enter("step", step)
        time.sleep(0.01)
    watchdog.enter("evaluation", 40)
    ctypes.PyDLL(None).usleep(int(2.7e6 * PACE))
    watchdog.enter("step", 40)
    watchdog.close()
    time.sleep(0.7 * PACE)
    """
    ran = alone(tmp_path / "hang", body)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not (tmp_path / "hang").exists()


@pytest.mark.gate
def test_no_limit_is_no_limit(tmp_path):
    """Oracle: twenty times the limit that the watchdog had before."""
    body = """
    watchdog = watched(0.01)
    watchdog.follow(None)
    watchdog.enter("step", 0)
    time.sleep(2 * PACE)
    watchdog.close()
    """
    ran = alone(tmp_path / "hang", body)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.gate
def test_a_crash_leaves_its_stack(tmp_path):
    """Oracle: the function that reads address 0."""
    ran = alone(tmp_path, "watchdog = watched(9)\nctypes.string_at(0)")
    assert ran.returncode < 0
    report = (tmp_path / "rank-0.txt").read_text()
    assert "Segmentation fault" in report and "in string_at" in report


@pytest.mark.gate
@pytest.mark.parametrize("who", ["rank", "counter", "rank and counter"])
def test_a_stop_is_no_time(tmp_path, who):
    """Oracle: a stop of four times the limit, alone as by a user, together as by a scheduler."""
    body = f"""
    import psutil, subprocess
    watchdog = watched(1.5 * PACE)
    rank, counter = os.getpid(), psutil.Process().children()[0].pid
    who = " ".join(map(str, [{who.replace(" and ", ", ")}]))
    for step in range(3):
        watchdog.enter("step", step)
        time.sleep(0.1 * PACE)
    subprocess.run(["sh", "-c", f"kill -STOP {{who}}; sleep {{6 * PACE}}; kill -CONT {{who}}"])
    watchdog.enter("step", 3)
    time.sleep(0.3 * PACE)
    watchdog.close()
    """
    ran = alone(tmp_path / "hang", body)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.gate
@pytest.mark.parametrize("stopped", [False, True])
def test_the_process_that_counts_ends_with_a_killed_rank(tmp_path, stopped):
    """Oracle: the process table."""
    body = "watchdog = watched(9)\nprint('ready', flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-c", ALONE + body, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "ready\n"
        (counter,) = psutil.Process(rank.pid).children()
        time.sleep(paced(0.5))
        if stopped:
            counter.suspend()
        rank.kill()
        assert not psutil.wait_procs([counter], timeout=paced(30))[1]


@pytest.mark.gate
def test_a_run_goes_on_with_a_line_if_nothing_counts(tmp_path):
    """Oracle: the killed process, and a program that outlives its limit."""
    body = """
    import psutil
    watchdog = watched(0.05)
    watchdog.enter("step", 0)
    psutil.Process().children()[0].kill()
    time.sleep(PACE)
    watchdog.close()
    """
    ran = alone(tmp_path / "hang", body)
    assert ran.returncode == 0
    told = "the watchdog's clock has failed: hangs are no longer detected; restart the run\n"
    assert ran.stderr == told


@pytest.mark.gate
def test_progress_that_comes_too_late_does_not_save_a_job(tmp_path):
    """Oracle: the exit code; in a real job, the remaining ranks have already reported an end."""
    body = """
    watchdog = watched(0.2)
    for step in range(2):
        watchdog.enter("step", step)
    time.sleep(0.6)
    while True:
        watchdog.enter("step", 2)
    """
    ran = alone(tmp_path, body)
    assert ran.returncode == 1
    assert ran.stderr.count("mpikfac: no progress for 0.2 s: rank 0 on ") == 1
    assert ' in "decompose" of step 1; stacks in ' in ran.stderr


FULL = """
    os.dup2(os.open("/dev/full", os.O_WRONLY), reports.file)
"""
SILENT_DISK = """
    os.fsync = lambda descriptor: time.sleep(60)
"""
REMOVED = """
    os.unlink(hang / "rank-0.txt")
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("storage", "why"),
    [
        (FULL, "No space left on device"),
        (SILENT_DISK, "no answer in 0.6 s"),
        (REMOVED, "the file was moved or removed"),
    ],
)
def test_a_hang_is_told_even_if_the_disk_is_full_or_hangs(tmp_path, storage, why):
    """Oracle: the function that hangs; a device that is full, an endless fsync, no file."""
    body = """
    def hangs():
        time.sleep(60)
    watchdog = Watchdog(reports, 0.2, lambda: "decompose")
    for step in range(2):
        watchdog.enter("step", step)
    hangs()
    """
    ran = alone(tmp_path, "    reports = Reports(hang, 0, 1)" + storage + body)
    assert ran.returncode == 1
    line, *stacks = ran.stderr.splitlines()
    assert line.startswith("mpikfac: no progress for 0.2 s: rank 0 on ")
    end = f'in "decompose" of step 1; stacks below, as {tmp_path}/rank-0.txt cannot be written: '
    assert line.endswith(end + why)
    assert any("in hangs" in stack for stack in stacks)


SPOILED = {
    '{"phase": "step", "step": "1", "stage": "", "waits": false, "host": "a"}': "rank 1 silent",
    '{"phase": "step", "step": 1, "stage": "", "waits": false, "host": "\\u001b[2J"}': "rank 1 on",
}


@pytest.mark.gate
@pytest.mark.parametrize("content", SPOILED)
def test_a_report_that_no_rank_writes_does_not_keep_the_line(tmp_path, content):
    """Oracle: one printable line that names both ranks."""
    body = f"""
    Path(sys.argv[1], "rank-1.txt").write_text({content!r})
    watchdog = Watchdog(Reports(hang, 0, 2), 0.2, lambda: "decompose")
    for step in range(2):
        watchdog.enter("step", step)
    time.sleep(60)
    """
    ran = alone(tmp_path, body)
    (line,) = ran.stderr.splitlines()
    assert line.isprintable() and "rank 0 on" in line and SPOILED[content] in line


WRITES = """
    watchdog = watched(0.2 * PACE)
    watchdog.enter("step", 0)
    watchdog.begin_write(4, lambda: UNFINISHED)
    for step in range(1, int(600 * PACE)):
        watchdog.enter("step", step)
        if step == END:
            watchdog.end_write()
        time.sleep(0.01)
    watchdog.close()
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("unfinished", "where"),
    [
        ("True", 'in "write" of checkpoint at step 4'),
        pytest.param("False", "waiting in checkpoint at step 4", marks=pytest.mark.slow),
    ],
)
def test_a_write_beside_the_steps_has_a_limit(tmp_path, unfinished, where):
    """Oracle: 10 times the limit of a step, while steps go on."""
    ran = alone(tmp_path, WRITES.replace("UNFINISHED", unfinished).replace("END", "-1"))
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"mpikfac: no progress for {paced(2):g} s: rank 0 on ")
    assert f"{where}; stacks in {tmp_path}" in ran.stderr
    in_time = alone(tmp_path, WRITES.replace("UNFINISHED", unfinished).replace("END", "50"))
    assert (in_time.returncode, in_time.stderr) == (0, "")


LATER = """
    watchdog = watched(0.1)
    watchdog.enter("step", 4)
    watchdog.begin_write(4, lambda: UNFINISHED)
    watchdog.enter("evaluation", 4)
    time.sleep(60)
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("unfinished", "where"),
    [
        ("True", 'in "write" of checkpoint at step 4'),
        ("False", 'in "decompose" of evaluation at step 4'),
    ],
)
def test_a_write_that_is_done_hides_no_phase_that_never_ends(tmp_path, unfinished, where):
    """Oracle: the place of the sleep, whose limit ends just after the limit of the write."""
    ran = alone(tmp_path, LATER.replace("UNFINISHED", unfinished))
    assert ran.returncode == 1
    assert f" {where}; stacks in {tmp_path}" in ran.stderr


LEFT = """
import os, sys
from mpikfac_apps.guard.launcher import end_launcher
end_launcher(0.2)
os.write(1, b"rank left\\n")
os._exit(1)
"""
STUBBORN = """#!/bin/sh
trap 'echo asked; [ $((asked += 1)) = 2 ] && exit 3' TERM
"$@" | cat
while :; do sleep 0.1; done
"""


@pytest.mark.gate
@pytest.mark.parametrize(("name", "asked"), [("prterun", 2), ("shell", 0)])
def test_a_launcher_that_stays_is_asked_to_leave(tmp_path, name, asked):
    """Oracle: a launcher that obeys the second signal; a parent that is none is left alone.

    `cat` ends only after no process has the rank's output open.
    """
    launcher = tmp_path / name
    launcher.write_text(STUBBORN if asked else '#!/bin/sh\n"$@"\nsleep 2\nexit 3')
    launcher.chmod(0o755)
    command = [str(launcher), sys.executable, "-c", LEFT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=paced(60))
    assert ended.returncode == 3
    assert ended.stdout == "rank left\n" + asked * "asked\n"


def report(stage: str, phase: str = "step", host: str = "node5") -> dict[str, object]:
    about = {"phase": phase, "step": 120, "stage": stage, "waits": stage == "publish bases"}
    return {"host": host, "pid": 1} | about


def test_the_summary_names_first_who_does_not_wait():
    """Oracle: groups of 9 ranks by hand."""
    waits, evaluates = report("publish bases"), report("", "evaluation")
    reports = [*[waits] * 3, report("forward", host="node7"), waits, None, evaluates, None]
    assert summary([*reports, report("")]) == (
        'rank 3 on node7 in "forward" of step 120; '
        "rank 6 on node5 in evaluation at step 120; "
        "rank 8 on node5 in step 120; "
        "ranks 5, 7 silent (stopped, holding the GIL, or at its end); "
        'ranks 0-2, 4 waiting in "publish bases" of step 120'
    )


@pytest.mark.gate
def test_reports_of_an_earlier_start_are_set_aside_if_there_are_any(tmp_path):
    """Oracle: a directory with a report, a directory with an empty report, and no directory."""
    hang = tmp_path / "hang"
    for content, kept in (("stack", 1), ("", 1)):
        hang.mkdir()
        (hang / "rank-0.txt").write_text(content)
        set_aside(hang)
        assert not hang.exists()
        assert len(list(tmp_path.glob("hang-*"))) == kept
    set_aside(hang)
    assert [path.read_text() for path in tmp_path.glob("hang-*/*")] == ["stack"]


def test_a_watchdog_that_fails_says_so(tmp_path, caplog):
    """Oracle: the line of the log."""
    watchdog = Watchdog(Reports(tmp_path, 0, 1), None)
    clock, watchdog.clock = watchdog.clock, None
    watchdog._thread.join(paced(5))
    watchdog.clock = clock
    watchdog.close()
    assert "the watchdog failed with AttributeError: hangs are no longer detected" in caplog.text
