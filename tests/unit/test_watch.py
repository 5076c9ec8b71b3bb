"""Ranks that can never meet in a step end the job, and print why."""

from __future__ import annotations

import re

import pytest

from support.launch import launch

SCRIPT = """
import os, threading, time
import torch
import mpikfac
from mpikfac.comm import watch

watch.LOOK, watch.LONG, watch.WAIT = 0.1, 0.5, WAITED
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
    text = SCRIPT.replace("STEPS", steps).replace("ARGUMENTS", arguments).replace("AFTER", after)
    text = text.replace("SETTINGS", settings).replace("SCALED", scaled).replace("WAITED", waited)
    return launch(ranks, "-c", text, env=env)


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


HANGS = {
    "a checkpoint": (
        "save_checkpoint",
        "if last: mpikfac.save_checkpoint(comm, FOLDER, trainer.state_dict(), 2)",
    ),
    "a state": ("load_state_dict", "if last: trainer.load_state_dict(trainer.state_dict())"),
    "a trainer": ("__init__", "if last: mpikfac.FirstOrderTrainer(model, optimizer, comm)"),
    "a call of the program": ("<module>", "if last: comm.Barrier()"),
    "an endless loop": ("<module>", "while last: pass"),
    "steps of one rank": (
        "step",
        "if last: model(torch.ones(4, 3)).sum().backward(); trainer.step()",
    ),
}


@pytest.mark.gate
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_ends_with_the_stacks_of_all_ranks(hang, tmp_path):
    """Oracle: the end of the job, and the function in which the last rank waits."""
    function, call = HANGS[hang]
    after = call.replace("FOLDER", repr(str(tmp_path))) + "\nwhile not last: time.sleep(0.1)"
    found = ended(2, "2", after=after, env={"MPIKFAC_WATCHDOG_TIMEOUT": "2"})
    assert found.returncode == 1
    for rank in range(2):
        assert re.search(rf"mpikfac: rank {rank} of 2, .*; stacks:", found.stderr), found.stderr
    _, _, stacks = found.stderr.partition("mpikfac: rank 1 of 2")
    assert re.search(rf'File ".*", line \d+ in {function}', stacks), found.stderr


@pytest.mark.gate
def test_a_program_that_fails_on_one_rank_ends_the_job():
    """Oracle: code 1 and the traceback; the other rank waits in a call of the program."""
    found = ended(2, "2", after="assert not last, 'lost'\ncomm.Barrier()")
    assert found.returncode == 1 and "AssertionError: lost" in found.stderr
