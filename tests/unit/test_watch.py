"""Ranks that can never meet in a step end the job, and print why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpikfac.comm import watch
from support.launch import LIMIT, environment, launch
from support.pace import paced

SCRIPT = """
import os, threading, time
import torch
import mpikfac
from mpikfac.comm import watch

watch.LOOK, watch.LONG, watch.WAIT, watch.LEAVE = 0.1, 0.5, WAITED, LEFT
comm = mpikfac.world()
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer = mpikfac.KFAC(model, optimizer, comm, SETTINGS)
last = comm.rank == comm.size - 1
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).sum()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    (scaler.scale(loss) if SCALED else loss).backward()
    trainer.step(ARGUMENTS)
AFTER
"""


def ended(
    ranks, steps="3", arguments="", settings="", scaled="False", after="", waited="60.0", env=None
):
    """Return the end of a job whose ranks take `steps` steps."""
    return launch(ranks, "-c", script(steps, arguments, settings, scaled, after, waited), env=env)


def script(steps="3", arguments="", settings="", scaled="False", after="", waited="60.0"):
    text = SCRIPT.replace("STEPS", steps).replace("ARGUMENTS", arguments).replace("AFTER", after)
    text = text.replace("SETTINGS", settings).replace("SCALED", scaled).replace("WAITED", waited)
    return text.replace("LEFT", f"{paced(2)}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_limit_of_a_process_group_ends_with_the_stacks(monkeypatch, capfd):
    """Oracle: the rank in the group, and the code; MPI sees a single rank, and sending fails."""
    codes = []
    monkeypatch.setenv(watch.TIMEOUT, "0.02")
    monkeypatch.setattr(watch, "LOOK", 0.01)
    monkeypatch.setattr(watch, "LEAVE", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", lambda code: codes.append(code) or sys.exit())
        patch.setattr(watch.Watch, "_send", None)
        watch.Watch(os.getpid()).start(SimpleNamespace(rank=2, size=3), met=False)
        (thread,) = [one for one in threading.enumerate() if one.name == "mpikfac watch"]
        thread.join()
    assert codes == [1]
    assert re.search(r"mpikfac: rank 2 of 3, .*: no progress for 0.02 s", capfd.readouterr().err)


@pytest.mark.gate
@pytest.mark.parametrize("steps", ["3 - (comm.rank == 1)", "2 + (comm.rank == 1)"])
def test_ranks_with_unequal_numbers_of_steps_end(steps):
    """Oracle: code 2 and one line, which names the rank that has ended and the step."""
    found = ended(3, steps)
    assert found.returncode == 2
    lines = re.findall(r"mpikfac: rank (\d) has ended, and rank (\d) waits in (.*);", found.stderr)
    assert lines and all(line[2] == "step 2 of KFAC" for line in lines)
    early = {"1"} if "- (" in steps else {"0", "2"}
    assert {line[0] for line in lines} <= early and not {line[1] for line in lines} & early


@pytest.mark.gate
@pytest.mark.parametrize(
    ("arguments", "settings", "differs"),
    [
        ("examples=4 if last and step == 1 else None", "", "examples in step 1 of KFAC"),
        ("scaler if last else None", "", "(scaler|other sizes)"),
        ("max_norm=0.1 if last else None", "'sharded-optimizer'", "max_norm in step 0 of KFAC"),
    ],
)
def test_arguments_on_one_rank_end_the_job(arguments, settings, differs):
    """Oracle: the end of the job, and the line; each of them waits for ever without the watch."""
    found = ended(
        2, arguments=arguments, settings=settings, scaled=f"{'scaler' in arguments} and last"
    )
    assert found.returncode != 0
    assert re.search(differs, found.stderr), found.stderr


@pytest.mark.gate
def test_a_rank_that_waits_elsewhere_is_named():
    """Oracle: the line of the rank that waits; the Barrier is not the library's."""
    after = "if comm.rank == 0: comm.Barrier()"
    timer = "if comm.rank == 0: threading.Timer(4, os._exit, [7]).start()\n"
    found = ended(2, "3 - (comm.rank == 0)", after=timer + after, waited="1.0")
    assert (
        "rank 1 has waited in step 2 of KFAC for 1 s, and rank 0 has not reached it" in found.stderr
    )


@pytest.mark.gate
def test_ranks_that_end_alike_tell_nothing():
    """Oracle: an empty stream; the second rank ends a little later."""
    found = ended(3, "2", after="time.sleep(1.2 * comm.rank)")
    assert (found.returncode, found.stderr) == (0, "")


SECONDS = f"{paced(2)}"  # of the timeout; the ranks may start at different times
HANGS = {
    "a checkpoint": (
        "save_checkpoint",
        "if last: mpikfac.save_checkpoint(comm, FOLDER, trainer.state_dict(), 2)",
    ),
    "a state": ("load_state_dict", "if last: trainer.load_state_dict(trainer.state_dict())"),
    "a trainer": ("__init__", "if last: mpikfac.FirstOrderTrainer(model, optimizer, comm)"),
    "a call of the program": ("<module>", "if last: comm.Barrier()"),
    "an endless loop": ("<module>", "while last: pass"),
    "a disk that is full": (
        "<module>",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nwhile last: pass",
    ),
    "steps of one rank": (
        "step",
        "if last: model(torch.ones(4, 3)).sum().backward(); trainer.step()",
    ),
}


def by_mpirun(program: Path) -> subprocess.CompletedProcess[str]:
    return launch(2, str(program), env={"MPIKFAC_WATCHDOG_TIMEOUT": SECONDS})


def by_mpikfac(program: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpikfac_apps", "launch", "-n", "2"]
    command += ["--watchdog_timeout", SECONDS]
    chosen = {"env": environment(), "capture_output": True, "text": True, "timeout": paced(LIMIT)}
    return subprocess.run([*command, str(program)], stdin=subprocess.DEVNULL, check=False, **chosen)


@pytest.mark.gate
@pytest.mark.parametrize("start", [by_mpirun, pytest.param(by_mpikfac, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_ends_with_the_stacks_of_all_ranks(hang, start, tmp_path):
    """Oracle: the end of the job, and the function in which the last rank waits."""
    function, call = HANGS[hang]
    after = call.replace("FOLDER", repr(str(tmp_path))) + "\nwhile not last: time.sleep(0.1)"
    program = tmp_path / "program.py"
    program.write_text(script("2", after=after))
    found = start(program)
    assert found.returncode == 1
    for rank in range(2):
        assert re.search(rf"mpikfac: rank {rank} of 2, .*; stacks:", found.stderr), found.stderr
    _, _, stacks = found.stderr.partition("mpikfac: rank 1 of 2")
    assert re.search(rf'File ".*", line \d+ in {function}', stacks), found.stderr


@pytest.mark.gate
def test_a_first_trainer_of_one_rank_ends_the_job():
    """Oracle: the end of the job, and the function in which rank 0 waits; rank 1 has no trainer."""
    late = "strategy=time.sleep(600) if comm.rank else None"
    found = ended(2, settings=late, env={"MPIKFAC_WATCHDOG_TIMEOUT": SECONDS})
    assert found.returncode == 1
    assert re.search(r"rank 0 of 2, .*; stacks:", found.stderr), found.stderr
    assert re.search(r'File ".*", line \d+ in __init__', found.stderr), found.stderr


@pytest.mark.gate
def test_a_hang_ends_without_stderr():
    """Oracle: the code of the job."""
    closed = "os.close(2)\nwhile True: time.sleep(0.1)"
    assert ended(2, "2", after=closed, env={"MPIKFAC_WATCHDOG_TIMEOUT": SECONDS}).returncode == 1


@pytest.mark.gate
def test_a_watch_that_fails_says_so():
    """Oracle: the line; the program goes on to its end."""
    broken = "watch.Watch._receive = None\ntime.sleep(1)"
    found = ended(1, "2", after=broken, env={"MPIKFAC_WATCHDOG_TIMEOUT": "60"})
    assert found.returncode == 0
    told = "so hangs are no longer detected: TypeError: "
    line = f"mpikfac: the watchdog thread of rank 0 has failed, {told}"
    assert found.stderr.count(line) == 1, found.stderr


@pytest.mark.gate
def test_a_program_that_fails_on_one_rank_ends_the_job():
    """Oracle: code 1 and the traceback; the other rank waits in a call of the program."""
    found = ended(2, "2", after="assert not last, 'lost'\ncomm.Barrier()")
    assert found.returncode == 1 and "AssertionError: lost" in found.stderr
