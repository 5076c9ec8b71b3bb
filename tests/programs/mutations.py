"""Makes mistakes in a copy of the library, one at a time, and names the test that sees the mistake.

    PYTHONPATH=tests python tests/programs/mutations.py [WORD ...]

Run the program in the repository's root. The table is `support/mistakes.py`. Without words the
program tries the whole table; with words, the mistakes whose description has one of the words. A
mistake is one wrong line. The tests of the mistake's target have to fail on the wrong line and to
pass on the right line. The tests of `bash jobs/test.sh` come first (lane "quick"), then those of
`--lab` and of `--ci` (lanes "lab" and "ci"), then the rest (lane "all"). The exit code is 1 if a
mistake survives, or if an old text of the table is not found exactly once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import chdir
from pathlib import Path

from support import launch
from support.mistakes import TABLE, Mistake
from support.pace import paced

ROOT = Path(__file__).parents[2]
COPIED = ("mpikfac", "apps", "benchmarks", "tests", "pyproject.toml")
# The marks of the tests that a lane adds.
LANES = {
    "quick": "not slow and not gate and not lab",
    "lab": "lab and not slow and not gate",
    "ci": "gate",
    "all": "slow and not gate",
}
LIMIT = paced(240)  # seconds of a run of tests; a mistake may let ranks wait for ever
FAILURE = re.compile(r"^(?:FAILED|ERROR|rank \d+:) (tests/\S+::.+?)(?= - |$)", re.MULTILINE)


def output(
    copy: Path, arguments: Iterable[str], ranks: int, limit: float = LIMIT, **env: str
) -> tuple[int | None, str]:
    """Run pytest in the copy; return its exit code, None after `limit` seconds, and its output."""
    command = [sys.executable, "-m", "pytest", *arguments]
    env["PYTHONPATH"] = f"{copy}:{copy / 'apps'}"
    with chdir(copy):
        if ranks > 1:
            job = launch.start(ranks, *command[1:], env=env)
        else:
            job = subprocess.Popen(
                command,
                env=launch.environment() | env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
    with job:
        try:
            texts = job.communicate(timeout=limit)
        except BaseException as error:
            launch.kill(job)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
    return job.returncode, "\n".join(texts)


def run(copy: Path, tests: list[str], ranks: int) -> str | None:
    """Return the first failing test of pytest's `tests` in the copy; None if all tests pass."""
    # A wrong line may have as many bytes as the right line: Python would take an old .pyc file.
    code, text = output(copy, ["-x", "-q", *tests], ranks, PYTHONDONTWRITEBYTECODE="1")
    if found := FAILURE.search(text):
        return found[1]
    if code is None:
        return f"no end after {LIMIT:g} s"
    return None if code in (0, 5) else f"exit code {code}"  # 5: no tests


def selected(mistake: Mistake, lane: str) -> list[str]:
    """Return pytest's arguments for the tests of the target in a lane."""
    return [mistake.target, "-m", LANES[lane]]


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
