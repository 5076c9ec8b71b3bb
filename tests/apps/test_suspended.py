"""Jobs and single ranks that are stopped for a while: stopped time is no time."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from support.launch import PROGRAMS, kill, launch, processes, start
from support.pace import paced

LIMIT = round(paced(4))  # seconds of a step; other phases have 10 times as many
PLACES = ("start-up", "forward", "checkpoint", "evaluation")
SHORT, FOR_EVER = paced(2), float("inf")
OPTIONS = (
    *("--batch=120", "--data.train_images=360", "--epochs=3", "--threads=1"),
    *("--kfac.inv_update_steps=1", "--checkpoint_every=2", f"--watchdog_timeout={LIMIT}"),
)


class Case(NamedTuple):
    """A stop of all ranks, or of a single rank, while rank 0 lingers at a place."""

    ranks: int
    place: str
    who: int | None  # None: all ranks
    seconds: float

    @property
    def limit(self) -> float:
        return LIMIT if self.place == "forward" else 10 * LIMIT

    def __str__(self) -> str:
        who = "all" if self.who is None else f"rank {self.who}"
        return f"{who} of {self.ranks} in {self.place} for {self.seconds:g} s"


def drawn(seed: int) -> Case:
    """Return a random case; a rank that is alone is stopped with its whole job."""
    chance = random.Random(seed)
    ranks, place = chance.randint(1, 4), chance.choice(PLACES)
    limit = Case(ranks, place, None, 0).limit
    if ranks == 1 or seed % 2:
        return Case(ranks, place, None, chance.choice([SHORT, limit + paced(4)]))
    return Case(ranks, place, chance.randrange(ranks), chance.choice([SHORT, FOR_EVER, FOR_EVER]))


CASES = [drawn(seed) for seed in range(20)]
GATING = [Case(2, "forward", None, LIMIT + paced(4)), Case(2, "forward", 1, FOR_EVER)]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.gate) for case in GATING),
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES),
    ],
    ids=str,
)
def test_a_stop_of_all_ranks_takes_no_time_and_a_rank_that_stays_stopped_ends_the_job(
    tmp_path, case
):
    """Oracle: the case; the seconds in the log are the seconds of the stop."""
    run, file = tmp_path / "run", tmp_path / "time"
    fault = (str(PROGRAMS / "faulty.py"), "linger", case.place, "0", str(file))
    with start(case.ranks, *fault, *OPTIONS, f"--run_dir={run}") as job:
        try:
            _, errors = suspended(job, file, case).communicate(timeout=paced(240))
        finally:
            if job.poll() is None:
                kill(job)
    if case.who is not None and case.seconds > case.limit:
        assert job.returncode != 0
        assert f"mpikfac: no progress for {case.limit:g} s: " in errors
        assert f"rank {case.who} silent" in errors or case.place == "start-up"
        return
    assert job.returncode == 0, errors
    log = (run / "log.txt").read_text()
    told = [int(seconds) for seconds in re.findall(r"was stopped for (\d+) s; this", log)]
    if case.who in (None, 0):
        assert sum(told) == pytest.approx(case.seconds, abs=paced(1.5)), log
    assert "complete after 9 steps" in log


def suspended(job, file: Path, case: Case):
    """Stop ranks of a job after `file` has appeared, and let them go on later; return the job."""
    while not file.exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    ranks = processes(job)
    stopped: list[psutil.Process] = ranks if case.who is None else [ranks[case.who]]
    for rank in stopped:
        rank.suspend()
    if case.seconds < FOR_EVER:
        time.sleep(case.seconds)
        for rank in stopped:
            rank.resume()
    return job


STARTS = """
import sys, time
from mpikfac_apps import __main__ as command
from mpikfac_apps.guard import ranks
from mpikfac_apps.options import parse as place
from mpikfac_apps.training import train
from mpikfac_apps.training.testing.options import EVALUATE
import mpikfac
where, limit = sys.argv[1], float(sys.argv[2])
def hangs(*_, **__):
    time.sleep(600)
first = ranks.Watchdog
ranks.Watchdog = lambda reports: first(reports, limit)
if where == "options":
    train.settings.of_start = hangs
elif mpikfac.world().rank == 1 and where == "cores":
    train.share_cores = hangs
elif where == "evaluate":
    type(EVALUATE).read = hangs
elif where == "calibrate":
    from mpikfac_apps.lab.predict import calibrate
    calibrate.TimedNetwork = hangs
sys.exit(command.main(sys.argv[3:]))
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ("options", ["train"]),
        pytest.param("cores", ["train", "--watchdog_timeout=LIMIT"], marks=pytest.mark.slow),
        pytest.param("evaluate", ["evaluate", "nowhere"], marks=pytest.mark.slow),
        pytest.param("calibrate", ["calibrate", "--out=DIRECTORY/m.json"], marks=pytest.mark.slow),
    ],
)
def test_whatever_waits_before_a_run_directory_is_open_has_a_limit(tmp_path, where, arguments):
    """Oracle: the function that sleeps; all ranks tell their own stacks."""
    program, limit = tmp_path / "program.py", paced(0.5)
    program.write_text(STARTS)
    values = {"LIMIT": str(limit), "DIRECTORY": str(tmp_path)}
    words = [re.sub("LIMIT|DIRECTORY", lambda m: values[m[0]], word) for word in arguments]
    job = launch(2, str(program), where, str(limit), *words)
    assert job.returncode == 1
    told = [line for line in job.stderr.splitlines() if line.startswith("mpikfac: ")]
    assert sorted(line.partition(" on ")[0] for line in told) == [
        f"mpikfac: no progress for {10 * limit:g} s: rank {rank}" for rank in range(2)
    ]
    assert all(line.endswith(" in start-up at step 0; stacks below") for line in told)
    assert "in hangs" in job.stderr
