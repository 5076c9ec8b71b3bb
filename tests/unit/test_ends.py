"""A rank that takes fewer steps than the others says so at its end."""

from __future__ import annotations

import re

import pytest

from support.launch import launch

SCRIPT = """
import os, threading, time
import torch
import mpikfac
from mpikfac.comm import ends

ends.WAIT = 0.5
comm = mpikfac.world()
model = torch.nn.Linear(3, 2)
optimizer = mpikfac.KFACOptimizer(model)
for _ in range(STEPS):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
AFTER
"""
ENDS_JOB = "if comm.rank == 0: threading.Timer(20, os._exit, [7]).start()\n"


def ended(ranks, steps, after="", before=""):
    """Return the end of a job whose ranks take `steps` steps."""
    text = SCRIPT.replace("STEPS", steps).replace("AFTER", after)
    return launch(ranks, "-c", text.replace("for _", before + "for _"))


@pytest.mark.gate
@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ("3 - (comm.rank == 1)", "rank 1 has ended, and rank 0 has not for 0.5 s"),
        ("2 + (comm.rank == 1)", "rank 2 has ended, and rank 1 has not for 0.5 s"),
    ],
)
def test_the_rank_that_ends_first_tells_who_has_not_ended(steps, line):
    """Oracle: the job, which no rank can end; a timer ends it."""
    timer = ENDS_JOB.replace("rank == 0", "rank == 0" if "- (" in steps else "rank == 1")
    told = ended(3, steps, before=timer.replace("20", "4")).stderr
    assert re.findall(r"mpikfac: (rank \d has ended, and rank \d has not for 0.5 s)", told) == [
        line
    ]
    assert "in a step of KFAC, give all ranks the same number of steps" in told


@pytest.mark.gate
def test_ranks_that_end_alike_tell_nothing():
    """Oracle: an empty stream; the second rank ends a little later."""
    found = ended(3, "2", after="time.sleep(0.2 * comm.rank)")
    assert (found.returncode, found.stderr) == (0, "")
