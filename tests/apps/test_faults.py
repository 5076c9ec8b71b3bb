"""Ranks die, hang or leave in every phase of a training run; refused jobs must not start."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pytest

import mpikfac
from mpikfac_apps.guard.lock import Lock
from support.launch import PROGRAMS, TRAIN, launch
from support.pace import paced

pytestmark = pytest.mark.slow

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
RANKS = 3 if SOAK else 2
LIMIT = round(paced(10))  # seconds of a step; other phases, as the start, have 10 times as many
SHORT = round(paced(2))
OPTIONS = (
    *("--batch=120", "--data.train_images=360", "--epochs=3", "--threads=1"),
    *("--kfac.inv_update_steps=1", "--checkpoint_every=2", f"--watchdog_timeout={LIMIT}"),
)
# A rank's own report of every place of faulty.py.
PLACES = {
    "start-up": "start-up at step 0",
    "data": "start-up at step 0",
    "forward": "step 1",
    "reduce statistics": "step 1",
    "decompose": "step 1",
    "publish bases": "step 1",
    "checkpoint": "checkpoint at step 2",
    "evaluation": "evaluation at step 2",
    "end": "end at step 9",
}
STEP = ("forward", "reduce statistics", "decompose", "publish bases")
TOLD = {"raise": "RuntimeError: on purpose", "exit": "SystemExit: 0"}
DEATHS = ("kill", "crash", "leave")  # only the launcher can report these ends
HANGS = ("sleep", "stop", "hold the GIL")

Case = tuple[str, str, int]
# Every kind and every place once, on either rank; with MPIKFAC_SOAK=1 all cases.
CASES: list[Case] = [
    ("raise", "data", 1),
    ("raise", "end", 0),
    ("exit", "evaluation", 1),
    ("exit", "start-up", 0),
    ("kill", "reduce statistics", 0),
    ("kill", "checkpoint", 1),
    ("crash", "publish bases", 1),
    ("leave", "end", 1),
    ("sleep", "publish bases", 0),
    ("stop", "forward", 1),
    ("hold the GIL", "decompose", 0),
    ("miscount", "reduce statistics", 1),
]
if SOAK:
    CASES = list(product((*TOLD, *DEATHS, *HANGS, "miscount"), PLACES, range(RANKS)))
GATING = [("raise", "end", 0), ("kill", "checkpoint", 1), ("sleep", "publish bases", 0)]


@dataclass
class End:
    """The end of a job."""

    code: int
    output: str
    hang: Path

    @property
    def told(self) -> list[str]:
        """Return the lines of mpikfac."""
        return [line for line in self.output.splitlines() if line.startswith("mpikfac: ")]


@pytest.fixture(scope="module")
def end(request, tmp_path_factory) -> Iterator[Callable[[Case], End]]:
    """Return a function that gives the end of a case's job; three jobs run at a time."""
    tests = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [test.params["case"] for test in tests if test and "case" in test.params]
    program = str(PROGRAMS / "faulty.py")
    root = tmp_path_factory.mktemp("faults")
    took: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def run(case: Case) -> End:
        kind, place, rank = case
        run_dir = root / "-".join(map(str, case)).replace(" ", "-")
        file = run_dir.with_suffix(".time")
        fault = (program, kind, place, str(rank), str(file))
        job = launch(RANKS, *fault, *OPTIONS, f"--run_dir={run_dir}")
        assert file.exists(), f"the job ended before the fault:\n{job.stdout}{job.stderr}"
        seconds = time.time() - float(file.read_text())
        took[kind, place].append(seconds)
        there = psutil.process_iter(["cmdline"])
        ours = [p for p in there if str(run_dir) in " ".join(p.info["cmdline"] or [])]
        # The launcher does not wait for the dead.
        assert not psutil.wait_procs(ours, timeout=paced(30))[1]
        return End(job.returncode, job.stdout + job.stderr, run_dir / "hang")

    with ThreadPoolExecutor(3) as pool:
        ends: dict[Case, Future[End]] = {case: pool.submit(run, case) for case in cases}
        yield lambda case: ends[case].result()
        pool.shutdown(cancel_futures=True)
    if SOAK:
        print("\nseconds from the fault to the end of the job, for every rank")
        for (kind, place), seconds in took.items():
            print(f"{kind:14}{place:20}{' '.join(f'{s:.1f}' for s in sorted(seconds))}")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.gate] * (case in GATING)) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_whatever_a_rank_does_the_job_ends_and_says_who_it_was(end, case):
    """Oracle: the kind, the place and the rank; the launcher's message if a rank is gone."""
    kind, place, rank = case
    ended = end(case)
    assert ended.code != 0
    where = PLACES[place]
    if kind in TOLD:
        (line,) = ended.told
        assert re.fullmatch(
            rf"mpikfac: rank {rank} of {RANKS}, \S+, {where}\S*: {TOLD[kind]}", line
        )
    elif kind in DEATHS:
        assert not ended.told
        assert re.search(r"exited (on|with|due to)|exiting improperly|non-zero", ended.output)
    elif kind in HANGS:
        (line,) = ended.told
        found = rf"rank {rank} silent \(stopped, holding the GIL, or at its end\)"
        if kind == "sleep":  # outside of steps, waiting ranks look like the slow rank
            stage = '("forward" of )?'  # other places lie between two stages
            found = rf"rank {rank} on \S+ in {stage}{where};" if place in STEP else f"in {where};"
        assert re.search(rf"no progress for \d+ s: .*{found}", line)
        assert "Thread 0x" in "".join(path.read_text() for path in ended.hang.glob("rank-*"))
    else:  # Open MPI waits, raises or crashes
        assert len(ended.told) <= 1


def test_a_write_that_never_ends_is_told_and_ends_the_job(tmp_path):
    """Oracle: the rank that sleeps in its write, while both ranks train on."""
    fault = (str(PROGRAMS / "faulty.py"), "sleep", "write", "1", str(tmp_path / "time"))
    options = (
        *("--batch=120", "--data.train_images=360", "--epochs=9999", "--threads=1"),
        "--eval_every=9999",  # a rank in a test would be told as such
        *(
            "--checkpoint_minutes=0.001",
            f"--watchdog_timeout={SHORT}",
            f"--run_dir={tmp_path / 'run'}",
        ),
    )
    job = launch(2, *fault, *options)
    ended = End(job.returncode, job.stdout + job.stderr, tmp_path / "run" / "hang")
    assert ended.code != 0
    log = (tmp_path / "run" / "log.txt").read_text()
    told = rf"rank 1 is still writing a checkpoint of step (\d+), begun {SHORT} s ago"
    step = re.search(told, log)[1]
    (line,) = ended.told
    assert re.fullmatch(
        rf"mpikfac: no progress for {10 * SHORT} s: "
        rf"rank 1 on \S+ in \"write\" of checkpoint at step {step}; "
        rf"rank 0 on \S+ waiting in checkpoint at step {step}; stacks in {ended.hang}",
        line,
    )
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] > int(step) + 10
    assert "in write_shard" in (ended.hang / "rank-1.txt").read_text()


def refused(tmp_path: Path, *program: str) -> str:
    """Return the last line of two refused ranks; check that the ranks leave no trace."""
    run = tmp_path / "run"
    before = sorted(run.rglob("*"))
    job = launch(2, *program, *OPTIONS, f"--run_dir={run}")
    (line,) = [line for line in job.stderr.splitlines() if "mpikfac: " in line]
    assert job.returncode == 2
    assert sorted(run.rglob("*")) == before
    return line


def test_a_second_job_in_a_run_directory_is_refused(tmp_path):
    """Oracle: the directory's process, and the remedy."""
    lock = Lock(tmp_path / "run")
    line = refused(tmp_path, TRAIN)
    lock.release()
    assert f"is in use by process {os.getpid()} on " in line
    assert line.endswith("or use another directory")


OTHER_CODE = """
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    sys.path.insert(0, sys.argv[1])
from mpikfac_apps.training import train
sys.exit(train.main(sys.argv[2:]))
"""


def test_ranks_with_other_code_are_refused(tmp_path):
    """Oracle: rank 1 imports a copy of the library with an added comment."""
    copy = Path(shutil.copytree(Path(mpikfac.__file__).parent, tmp_path / "copy" / "mpikfac"))
    with open(copy / "kron.py", "a") as file:
        file.write("# changed\n")
    program = tmp_path / "program.py"
    program.write_text(OTHER_CODE)
    line = refused(tmp_path, str(program), str(copy.parent))
    assert re.search(r"ranks disagree on mpikfac's code: '\w+' on rank 0, '\w+' on rank 1; ", line)
