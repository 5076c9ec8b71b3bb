"""Makes mistakes in a copy of the library, one at a time, and names the test that sees the mistake.

    PYTHONPATH=tests python tests/programs/mutations.py [WORD ...]

Run the program in the repository's root. Without words the program tries the whole table; with
words, the mistakes whose description has one of the words. A mistake is one wrong line. The tests
of the mistake's target have to fail on the wrong line and to pass on the right line. The tests of
`bash jobs/test.sh` come first (lane "fast"), then the tests marked slow (lane "slow"). The exit
code is 1 if a mistake survives, or if an old text of the table is not found exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from support import launch

ROOT = Path(__file__).parents[2]
COPIED = ("mpikfac", "apps", "tests", "pyproject.toml")
LANES = {"fast": "not slow", "slow": "slow"}  # marks of the tests, by lane
LIMIT = 240.0  # seconds of a run of tests; a mistake may let ranks wait for ever
FAILURE = re.compile(r"^(?:FAILED|ERROR|rank \d+:) (tests/\S+::\S+)", re.MULTILINE)


class Mistake(NamedTuple):
    """A wrong line.

    Attributes:
        what: the mistake in words.
        file: the file in `mpikfac/`.
        old: a text that the file has once.
        new: the text in the place of `old`.
        target: a file of tests, or a test.
        ranks: the ranks that run the target.
    """

    what: str
    file: str
    old: str
    new: str
    target: str
    ranks: int = 1


TABLE = (
    # -- the main path
    Mistake(
        "publish: bases are not sent to the workers of a layer",
        "kfac.py",
        "self.grid.exchange(self._messages[self.bases.share], self.bases.arena.flat)",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "publish: directions are not sent to the other columns",
        "kfac.py",
        "self.directions.publish()",
        "pass",
        "tests/mpi/test_training.py",
        3,
    ),
    Mistake(
        "clip: the KL clip is ignored",
        "kfac.py",
        "self.directions.clip(self.steps)",
        "pass",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "write back: directions are not written to the gradients",
        "kfac.py",
        "self.gradients.write(self.directions.slots)\n        self.gradients.write(self.gradients",
        "self.gradients.write(self.gradients",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "write back: a layer's bias takes the direction of the layer's first input",
        "layers/layer.py",
        "matrix[..., -1]]",
        "matrix[..., 0]]",
        "tests/unit/test_kinds.py",
    ),
    # -- sums
    Mistake(
        "reduce: the sum of gradients is not divided by the number of ranks",
        "engine/gradients.py",
        "self.arena.flat /= ranks",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "reduce: sums go over the column instead of the world",
        "plan/messages.py",
        'primitive, "world", parts, ranks, itemsize, 0, root, codec)',
        'primitive, "column", parts, ranks, itemsize, 0, root, codec)',
        "tests/mpi/test_training.py",
        3,
    ),
    # -- averages over time
    Mistake(
        "decay: a new factor has the weight of the old average",
        "engine/factors.py",
        "(1 - decay) * count / weight",
        "decay * count / weight",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "decay: the first averages are biased, as their weight is ignored",
        "engine/factors.py",
        "(1 - decay) * count / weight",
        "1 - decay",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "clip: the KL clip takes the learning rate instead of its square",
        "engine/directions.py",
        "if by_norm else self._along_gradient(2)",
        "if by_norm else self._along_gradient(1)",
        "tests/unit/test_kfac.py",
    ),
)


def run(copy: Path, tests: list[str], ranks: int) -> str | None:
    """Return the first failing test of pytest's `tests` in the copy; None if all tests pass."""
    command = ["-m", "pytest", "-x", "-q", *tests]
    # A wrong line may have as many bytes as the right line: Python would take an old .pyc file.
    env = {"PYTHONPATH": f"{copy}:{copy / 'apps'}", "PYTHONDONTWRITEBYTECODE": "1"}
    with chdir(copy):
        if ranks > 1:
            job = launch.start(ranks, *command, env=env)
        else:
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            job = subprocess.Popen(
                [sys.executable, *command],
                **{"env": os.environ | env, "stdin": nothing, "stdout": pipe, "stderr": pipe},
                text=True,
            )
    with job:
        try:
            texts = job.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            launch.kill(job)
            return f"no end after {LIMIT:g} s"
    if found := FAILURE.search("\n".join(texts)):
        return found[1]
    return None if job.returncode in (0, 5) else f"exit code {job.returncode}"  # 5: no tests


def selected(mistake: Mistake, lane: str) -> list[str]:
    """Return pytest's arguments for the tests of the target in a lane."""
    marked = ["-m", LANES[lane]]
    if not mistake.target.startswith("tests/mpi"):
        return [mistake.target, *marked]
    # tests/mpi/conftest.py marks tests by their number among all tests of tests/mpi.
    return ["tests/mpi", *marked, "-k", " and ".join(Path(mistake.target).name.split("::"))]


def caught(mistake: Mistake, copy: Path) -> tuple[str, str | None]:
    """Return the lane and the first test that fails on the mistake, but not on the right line.

    Raises:
        ValueError: the old text is not found exactly once, or the test fails on the right line.
    """
    file = copy / "mpikfac" / mistake.file
    right = file.read_text()
    if (count := right.count(mistake.old)) != 1:
        raise ValueError(f"{mistake.what}: {mistake.file} has {mistake.old!r} {count} times")
    file.write_text(right.replace(mistake.old, mistake.new))
    lane, test = "", None
    try:
        for lane in LANES:
            if test := run(copy, selected(mistake, lane), mistake.ranks):
                break
    finally:
        file.write_text(right)
    if test is None:
        return "", None
    again = [test] if "::" in test else selected(mistake, lane)
    if failing := run(copy, again, mistake.ranks):
        raise ValueError(f"{mistake.what}: {failing} fails on the right line, too")
    return lane, test


def main(words: list[str]) -> int:
    """Try the mistakes whose description has one of the words, and print a table."""
    chosen = [one for one in TABLE if not words or any(word in one.what for word in words)]
    failed = 0
    print("mutation | lane | caught by | seconds", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                shutil.copy(ROOT / name, copy)
        for mistake in chosen:
            began = time.monotonic()
            try:
                lane, test = caught(mistake, copy)
            except ValueError as error:
                lane, test = "", f"ERROR: {error}"
            failed += not lane
            seconds = time.monotonic() - began
            print(f"{mistake.what} | {lane} | {test or 'SURVIVES'} | {seconds:.0f}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} are caught")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
