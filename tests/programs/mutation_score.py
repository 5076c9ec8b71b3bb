"""Measure what the quick tests detect: mutate random places of the core, and count failing mutants.

    pip install cosmic-ray
    PYTHONPATH=tests python tests/programs/mutation_score.py [--mutants 150] [--out FOLDER]

First, the quick tests run once in a copy of the repository: those of one process, and tests/mpi on
2 ranks. Coverage contexts tell which tests execute a line. Then places of the core are drawn, each
with one of Cosmic Ray's operators: another comparison, another arithmetic or logical operator, a
number that is one off, `not`, `break` for `continue`, another exception, a loop without iterations.
Each mutant runs tests that execute its line: those that execute the fewest lines first, at most
`--tests` of one process, and if all of these pass, as many on 2 ranks. A mutant is killed if a test
fails or does not end. A line that no test executes counts as a survivor, although a test may start
a program that executes it: programs in processes of their own are not traced.

Results are rows of FOLDER/mutants.jsonl, and a second run continues with the missing mutants.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from support import launch
from support.pace import paced

ROOT = Path(__file__).parents[2]
COPIED = ("mpikfac", "apps", "benchmarks", "docs", "jobs", "tests", "README.md", "pyproject.toml")
OUTSIDE = ("lab", "predict")  # folders of mpikfac/ that are not the core
QUICK = "not slow and not gate and not lab"
RANKS = (1, 2)
# `|` is mostly a part of annotations, which are not evaluated. Without a decorator, imports fail.
LEFT_OUT = ("BitOr", "RemoveDecorator", "Variable", "Keyword", "NoOp")
Tests = dict[tuple[str, int], list[str]]  # of a line: a file below mpikfac/, and a number


class Mutant(NamedTuple):
    """A change of the code: an operator of Cosmic Ray, at one of the places it can change."""

    file: str
    line: int
    operator: str
    occurrence: int


def main() -> None:
    """Collect the tests of each line, run the mutants, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=20, help="of a mutant, per number of ranks")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation_score"))
    options = parser.parse_args()
    out = options.out.resolve()
    copy, rows = out / "copy", out / "mutants.jsonl"
    if not copy.is_dir():
        make_copy(copy)
    tests = {ranks: tests_of_lines(copy, out / f"coverage {ranks}", ranks) for ranks in RANKS}
    known = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    for mutant in drawn(copy, options.mutants, options.seed)[len(known) :]:
        known.append(tried(copy, mutant, tests, options.tests))
        with rows.open("a") as file:
            print(json.dumps(known[-1]), file=file)
        print(" | ".join(map(str, known[-1].values())), flush=True)
    report(known)


def make_copy(copy: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(ROOT / name, copy)


def tests_of_lines(copy: Path, place: Path, ranks: int) -> Tests:
    """Return the tests that execute each line, those that execute the fewest lines first.

    The quick tests run once for this; the data of their coverage are kept in `place`.
    """
    if not place.is_dir():
        part = place.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        settings = f"[run]\nsource = mpikfac\ndata_file = {part}/data.${{OMPI_COMM_WORLD_RANK-0}}\n"
        (part / "settings").write_text(settings)
        counted = ("--cov", "--cov-report=", "--cov-context=test", f"--cov-config={part}/settings")
        chosen = ("tests/mpi",) if ranks > 1 else ("-n2", "--ignore=tests/mpi", "tests")
        run(copy, ranks, ["-q", "-m", QUICK, *counted, *chosen], paced(7200), sys.stderr.fileno())
        part.rename(place)
    found = defaultdict(set)
    for file in place.glob("data.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            inside = Path(name).relative_to(copy / "mpikfac").as_posix()
            for line, contexts in data.contexts_by_lineno(name).items():
                found[inside, line] |= {
                    one.removesuffix("|run") for one in contexts if "|run" in one
                }
    lines = Counter(test for tests in found.values() for test in tests)
    return {line: sorted(tests, key=lines.__getitem__) for line, tests in found.items()}


def drawn(copy: Path, count: int, seed: int) -> list[Mutant]:
    """Return mutants of `count` random places, each with one of the operators that apply there."""
    places = defaultdict(list)
    for path in sorted((copy / "mpikfac").rglob("*.py")):
        file = path.relative_to(copy / "mpikfac")
        if file.parts[0] in OUTSIDE:
            continue
        tree = get_ast(path.read_text())
        for name in operator_names():
            if any(word in name for word in LEFT_OUT):
                continue
            operator = get_operator(name)()
            starts = (
                place for node in ast_nodes(tree) for place in operator.mutation_positions(node)
            )
            for occurrence, (start, _) in enumerate(starts):
                places[file, start].append(Mutant(file.as_posix(), start[0], name, occurrence))
    draw = random.Random(seed)
    return [draw.choice(places[place]) for place in draw.sample(sorted(places), count)]


def tried(copy: Path, mutant: Mutant, tests: dict[int, Tests], most: int) -> dict[str, str | int]:
    """Run the tests of a mutant; return what was changed, and the result."""
    path = copy / "mpikfac" / mutant.file
    right = path.read_text()
    wrong = mutate_code(right, get_operator(mutant.operator)(), mutant.occurrence)
    result = "not executed"
    path.write_text(wrong)
    try:
        for ranks in RANKS:
            chosen = tests[ranks].get((mutant.file, mutant.line), [])[:most]
            if chosen and result != "killed":
                failed = run(copy, ranks, ["-q", "-x", *chosen], paced(300), subprocess.DEVNULL)
                result = "killed" if failed else "survived"
    finally:
        path.write_text(right)
    changes = difflib.unified_diff(right.splitlines(), wrong.splitlines(), lineterm="", n=0)
    new = [line[1:].strip() for line in list(changes)[3:] if line.startswith("+")]
    return {"file": mutant.file, "line": mutant.line, "now": " ".join(new), "result": result}


def run(copy: Path, ranks: int, tests: list[str], limit: float, output: int) -> bool:
    """Run pytest in the copy; return whether a test fails or the tests do not end."""
    mpirun, flags = launch.launcher()
    started = [mpirun, *flags, "-n", str(ranks)] if ranks > 1 else []
    paths = (copy, copy / "apps", copy / "tests")
    # A changed line may have as many bytes as the right line: Python would take an old .pyc file.
    env = {"PYTHONPATH": ":".join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    job = subprocess.Popen(
        [*started, sys.executable, "-m", "mpi4py", "-m", "pytest", *tests],
        cwd=copy,
        env=launch.environment() | env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    with job:
        try:
            job.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            launch.kill(job)
    return job.returncode != 0


def report(rows: list[dict[str, str | int]]) -> None:
    """Print the score by package, and the mutants that are left."""
    packages = defaultdict(Counter)
    for row in rows:
        package = str(row["file"]).partition("/")[0]
        packages[package if "." not in package else "mpikfac"][str(row["result"])] += 1
    for name, results in sorted(packages.items()):
        print(name, dict(results))
    killed = sum(row["result"] == "killed" for row in rows)
    executed = sum(row["result"] != "not executed" for row in rows)
    print(f"{killed} of {len(rows)} killed: {killed / len(rows):.0%}")
    print(f"of the {executed} in lines that these tests execute: {killed / executed:.0%}")


if __name__ == "__main__":
    main()
