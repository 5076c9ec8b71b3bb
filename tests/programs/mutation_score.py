"""Measure the mutation score of the core: the share of random changes that make a test fail.

    pip install cosmic-ray
    PYTHONPATH=tests python tests/programs/mutation_score.py [--sample 150] [--seed 0] [--out DIR]

The program works on a copy of the last commit. First, the tests of one process that every change
must pass run on unchanged code, with coverage, which records the tests that execute each line. Then
random places of the core are drawn, and each gets one of Cosmic Ray's mutations: another comparison
or arithmetic operator, a number that is one off, `and` for `or`, `not`, no decorator, a loop
without iterations, another exception. A mutant is tried by the tests that execute the line, the
quickest first, until one fails or takes several times as long as on unchanged code. The slowest
tests are left out, so that the others together take at most MOST seconds on unchanged code. A line
that runs on import, such as a constant or a default value, is tried by the tests that execute
functions of its file, or else of its folder. Mutants that are left are then tried in the same way
by the tests on two ranks.

Tests that fail on unchanged code are named, and find nothing: those that fail with coverage, and
those that found a mutant, but fail again when all such tests run once more on unchanged code. The
score is the share of mutants found among those whose line the tests execute; programs that tests
start in processes of their own are not traced. Each attempt is a row of DIR/mutants.jsonl, and a
second run continues with the missing ones. Delete rows to try their mutants again, and add a field
"equivalent", with the reason, to the last row of a survivor that no test can find.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import coverage
import pytest
import torch  # noqa: F401  # once, for all forks
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from programs import mutations
from programs.mutations import FAILURE, ROOT
from support import launch
from support.pace import paced

CORE = ("numerics", "layers", "preconditioners", "engine", "plan", "comm", "model")
CORE += ("kfac.py", "optimizer.py", "trainer.py")
FOLDERS = {1: ("tests/unit", "tests/property"), 2: ("tests/mpi",)}  # by ranks
MOST = 100  # seconds that all tests of a mutant may take on unchanged code, with coverage
SLOWER = 5  # how many times longer than on unchanged code a mutant's test may take
START = 30  # seconds that a start of pytest may take
SECONDS = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.+?)\s*$", re.MULTILINE)
Row = dict[str, str | int]
Key = tuple[str, int, str]
"""A mutant: its file, its line and the difference."""


class Mutant(NamedTuple):
    """A change of a file in `mpikfac/`."""

    file: str
    line: int
    wrong: str
    right: str

    def key(self) -> Key:
        """Return what identifies the mutant in the results."""
        texts = self.right.splitlines(), self.wrong.splitlines()
        lines = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
        return self.file, self.line, "\n".join(x for x in lines if not x.startswith("@@"))


def main() -> None:
    """Try the mutants that are not in the results, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutation_score")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "mutants.jsonl")
    with copied() as copy, chdir(copy):
        sample = list(itertools.islice(drawn(copy, options.seed), options.sample))
        for ranks in FOLDERS:
            tests = Tests(copy, out, ranks)
            while left := [each for each in sample if results.lacks(each.key(), ranks)]:
                for mutant in left:
                    results.add(mutant.key(), ranks, tests.tried(mutant))
                results.drop(tests.flaky(results.finders(ranks)))
        results.report([mutant.key() for mutant in sample])
        print(f"coverage of the core by these tests: {100 * covered(copy, out):.1f} %")


@contextmanager
def copied() -> Iterator[Path]:
    """Return a folder with the tracked files of the last commit, after which it is named.

    The folder is removed at the end.
    """
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    files = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / commit
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(copy, filter="data")
        yield copy


# -- mutants ---------------------------------------------------------------------------------------


def core(copy: Path) -> list[str]:
    """Return the files of the core, in `mpikfac/`."""
    paths = [copy / "mpikfac" / name for name in CORE]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return sorted(file.relative_to(copy / "mpikfac").as_posix() for file in files)


def drawn(copy: Path, seed: int) -> Iterator[Mutant]:
    """Return mutants in random order, one for each place that Cosmic Ray can change."""
    # The two operators for variables need names of variables.
    operators = {name: get_operator(name)() for name in operator_names() if "Variable" not in name}
    places = defaultdict(list)
    sources = {file: (copy / "mpikfac" / file).read_text() for file in core(copy)}
    for file, source in sources.items():
        nodes = list(ast_nodes(get_ast(source)))
        for name, operator in operators.items():
            found = (place for node in nodes for place in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(found):
                places[file, start].append((name, occurrence))
    draw = random.Random(seed)
    for file, start in draw.sample(sorted(places), len(places)):
        name, occurrence = draw.choice(places[file, start])
        wrong = mutate_code(sources[file], operators[name], occurrence)
        if differ(sources[file], wrong):
            yield Mutant(file, start[0], wrong, sources[file])


def differ(right: str, wrong: str) -> bool:
    """Return whether a mutant is valid Python that differs in more than annotations."""
    try:
        with warnings.catch_warnings(action="error", category=SyntaxWarning):
            compile(wrong, "", "exec")
    except (SyntaxError, SyntaxWarning):  # such as `is` with a literal
        return False
    texts = []
    for tree in map(ast.parse, (right, wrong)):
        for node in ast.walk(tree):
            vars(node).pop("annotation", None)
            vars(node).pop("returns", None)
        texts.append(ast.dump(tree))
    return texts[0] != texts[1]


# -- tests -----------------------------------------------------------------------------------------


def run(copy: Path, arguments: Sequence[str], ranks: int, limit: float) -> tuple[int | None, str]:
    """Run pytest in the copy; return its exit code, None after `limit` seconds, and its output.

    The tests of one process run in a fork, which need not import torch.
    """
    if ranks > 1:
        return mutations.output(copy, arguments, ranks, limit)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        fork = multiprocessing.get_context("fork").Process(
            target=_run, args=(copy, arguments, output)
        )
        fork.start()
        try:
            fork.join(limit)
        finally:
            if late := fork.is_alive():
                launch.kill(fork)
                fork.join()
        output.seek(0)
        return None if late else fork.exitcode, output.read()


def _run(copy: Path, arguments: Sequence[str], output: IO[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    paths = [str(copy), str(copy / "apps"), str(copy / "tests")]
    sys.path[:] = paths + [path for path in sys.path if not path.startswith(str(ROOT / "tests"))]
    os.environ.update(launch.environment() | {"PYTHONPATH": ":".join(paths)})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("programs", "support")]:
        del sys.modules[name]  # the copy has its own
    code = pytest.main([*arguments])
    if mpi := sys.modules.get("mpi4py.MPI"):
        mpi.Finalize()
    sys.exit(code)


class Tests:
    """The tests that pass on unchanged code, with their durations and the lines that they execute.

    Args:
        copy: the copy of the repository.
        out: the folder of the measurement on unchanged code, which a new commit repeats.
        ranks: the number of ranks that run the tests.
    """

    def __init__(self, copy: Path, out: Path, ranks: int) -> None:
        self._copy, self._ranks = copy, ranks
        self._list = out / "tests.txt"
        data, file = out / f"lines.{ranks}", out / f"unchanged.{ranks}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        if stored.get("commit") != copy.name:
            settings = out / "coverage.ini"
            of_rank = f"{data}.${{OMPI_COMM_WORLD_RANK-0}}"
            settings.write_text(
                f"[run]\nsource = mpikfac\nrelative_files = True\ndata_file = {of_rank}\n"
            )
            counted = ("--cov", "--cov-report=", "--cov-context=test", f"--cov-config={settings}")
            stored = {"commit": copy.name, **self._passing([*counted, *FOLDERS[ranks]])}
            data.unlink(missing_ok=True)
            _coverage(data).combine(map(str, out.glob(f"{data.name}.?")), keep=True)
            file.write_text(json.dumps(stored))
        self._seconds: dict[str, float] = stored["seconds"]
        self._lines = _coverage(data)
        self._lines.load()
        total = sum(self._seconds.values())
        print(
            f"{ranks=}: {len(self._seconds)} tests in {total:.0f} s; failing: {stored['failing']}"
        )

    def _passing(self, chosen: Sequence[str]) -> dict[str, list[str] | dict[str, float]]:
        """Return the seconds of each test that passes, and the failing tests."""
        failing: set[str] = set()
        while True:
            left_out = (f"--deselect={test}" for test in failing)
            # If a test fails on one rank, the other ranks may wait in it.
            stop = ["-x"] if self._ranks > 1 else ["-n2"]
            marks = ("-m", "not slow and not lab", "-vv", "--durations=0")
            arguments = (*marks, *stop, *left_out, *chosen)
            code, text = mutations.output(self._copy, arguments, self._ranks, paced(3600))
            new = set(FAILURE.findall(text))
            failing |= new
            if code == 0 or (new and self._ranks == 1):
                break
            if not new:
                raise SystemExit(f"the tests end with exit code {code}:\n{text[-3000:]}")
        seconds: Counter[str] = Counter()
        for taken, test in SECONDS.findall(text):
            seconds[test] += float(taken)
        passing = {test: seconds[test] for test in seconds if test not in failing}
        return {"seconds": passing, "failing": sorted(failing)}

    def tried(self, mutant: Mutant) -> Row:
        """Run the tests of a mutant; return the result, and the test that finds the mutant."""
        tests = self._executing(mutant) & self._seconds.keys()
        if not tests:
            return {"result": "not executed"}
        tests = self._quickest(tests)
        path = self._copy / "mpikfac" / mutant.file
        path.write_text(mutant.wrong)  # newer than compiled files of older texts
        code, text = self._run(tests)
        path.write_text(mutant.right)
        if code == 0:
            return {"result": "survives"}
        failing = FAILURE.search(text)
        ended = "time limit" if code is None else f"exit code {code}"
        return {"result": "found", "by": failing[1] if failing else ended}

    def _quickest(self, tests: set[str]) -> set[str]:
        """Return the quickest tests, which together take at most MOST seconds; at least one."""
        ordered = sorted(tests, key=self._seconds.__getitem__)
        until = itertools.accumulate(self._seconds[test] for test in ordered)
        return {test for test, end in zip(ordered, until) if end <= MOST or test == ordered[0]}

    def flaky(self, finders: set[str]) -> set[str]:
        """Return the tests that fail on unchanged code, among those that found a mutant."""
        flaky: set[str] = set()
        while left := finders & self._seconds.keys() - flaky:
            code, text = self._run(left)
            if code == 0:
                break
            found = set(FAILURE.findall(text))
            if not found:
                raise SystemExit(f"unchanged code: exit code {code}:\n{text[-3000:]}")
            flaky |= found
        if flaky:
            print("these tests fail on unchanged code:", *sorted(flaky))
        for test in flaky:
            self._seconds.pop(test, None)
        return flaky

    def _run(self, tests: Iterable[str]) -> tuple[int | None, str]:
        """Run tests, the quickest first, until one fails."""
        seconds = {test: self._seconds[test] for test in tests}
        self._list.write_text("\n".join(sorted(seconds, key=seconds.__getitem__)))
        limit = f"--timeout={START + SLOWER * max(seconds.values()):.0f}"
        options = ("-x", limit, "-o", "timeout_method=thread")
        most = paced(2 * START + SLOWER * sum(seconds.values()))
        code, text = run(self._copy, [*options, f"@{self._list}"], self._ranks, most)
        if code == 4:  # pytest finds no such test: the change has renamed a case
            names = dict.fromkeys(test.partition("[")[0] for test in seconds)
            code, text = run(self._copy, [*options, *names], self._ranks, most)
        return code, text

    def _executing(self, mutant: Mutant) -> set[str]:
        """Return the tests that execute the statement that a mutant changes."""
        file, line = mutant.file, mutant.line
        parts = list(statements(ast.parse(mutant.right)))
        own = [(lines, inside) for lines, inside in parts if line in lines]
        part, inside = min(own, key=lambda one: len(one[0]), default=(range(line, line + 1), False))
        by_line = self._by_line(file)
        if not by_line.keys() & set(part):
            return set()
        if not inside:  # it runs on import
            part = [number for lines, inside in parts if inside for number in lines]
        tests = set().union(*(by_line.get(number, ()) for number in part))
        folder = [other for other in core(self._copy) if Path(other).parent == Path(file).parent]
        return tests or set().union(
            *(tests for other in folder for tests in self._by_line(other).values())
        )

    def _by_line(self, file: str) -> dict[int, set[str]]:
        """Return the tests of each line that runs; a line that only runs on import has none."""
        contexts = self._lines.get_data().contexts_by_lineno(f"mpikfac/{file}")
        return {
            line: {one.rpartition("|")[0] for one in names} - {""}
            for line, names in contexts.items()
        }


def _coverage(data: Path) -> coverage.Coverage:
    return coverage.Coverage(str(data), config_file=str(data.with_name("coverage.ini")))


def covered(copy: Path, out: Path) -> float:
    """Return the share of the core's statements that the tests execute."""
    (out / "lines").unlink(missing_ok=True)
    measured = _coverage(out / "lines")
    measured.combine([str(out / f"lines.{ranks}") for ranks in FOLDERS], keep=True)
    counts: Counter[str] = Counter()
    for file in core(copy):
        _, lines, _, missing, _ = measured.analysis2(f"mpikfac/{file}")
        counts.update(lines=len(lines), missing=len(missing))
    return 1 - counts["missing"] / counts["lines"]


def statements(node: ast.AST, inside: bool = False) -> Iterator[tuple[Sequence[int], bool]]:
    """Return the lines of each statement, without its body, and whether a function contains it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", ()))])
            body = getattr(child, "body", None)
            last = max(child.lineno, body[0].lineno - 1) if body else child.end_lineno
            yield range(first, last + 1), inside
        yield from statements(child, inside or isinstance(child, ast.FunctionDef))


# -- results ---------------------------------------------------------------------------------------


class Results:
    """The rows of a file, one for each mutant and number of ranks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._rows: dict[tuple[Key, int], Row] = {}
        for row in map(json.loads, lines):
            self._rows[(row["file"], row["line"], row["diff"]), row["ranks"]] = row

    def lacks(self, key: Key, ranks: int) -> bool:
        """Return whether a mutant has to be tried on `ranks` ranks."""
        return (key, ranks) not in self._rows and self._last(key).get("result") != "found"

    def _last(self, key: Key) -> Row:
        rows = [self._rows[key, ranks] for ranks in FOLDERS if (key, ranks) in self._rows]
        tried = [row for row in rows if row["result"] != "not executed"]
        return (tried or rows or [{}])[-1]

    def add(self, key: Key, ranks: int, row: Row) -> None:
        """Add a result, and print it."""
        row = dict(zip(("file", "line", "diff"), key)) | {"ranks": ranks} | row
        self._rows[key, ranks] = row
        with self._file.open("a") as opened:
            print(json.dumps(row), file=opened)
        print(" | ".join(map(str, row.values())).replace("\n", "  "), flush=True)

    def finders(self, ranks: int) -> set[str]:
        """Return the tests that found a mutant."""
        rows = [row for (_, number), row in self._rows.items() if number == ranks]
        return {str(row["by"]) for row in rows if "by" in row}

    def drop(self, flaky: set[str]) -> None:
        """Remove the results of tests that fail on unchanged code."""
        self._rows = {key: row for key, row in self._rows.items() if row.get("by") not in flaky}
        self._file.write_text("".join(f"{json.dumps(row)}\n" for row in self._rows.values()))

    def report(self, keys: Iterable[Key]) -> None:
        """Print the survivors, and the score with its 95 % interval, by package and in total."""
        rows = [self._last(key) for key in keys]
        packages = defaultdict(Counter)
        for row in rows:
            packages[str(row["file"]).partition("/")[0]][row["result"]] += 1
        for name, results in sorted(packages.items()):
            print(f"{name}: {dict(results)}")
        total = sum(packages.values(), Counter())
        for row in rows:
            if row["result"] == "survives":
                print(f"\n{row['file']}:{row['line']} {row.get('equivalent', '')}\n{row['diff']}")
        print(
            f"\n{total['not executed']} of {len(rows)} mutants are in lines that no test executes"
        )
        tried = total["found"] + total["survives"]
        equivalent = sum("equivalent" in row for row in rows)
        for kind, count in {"": tried, "not equivalent ": tried - equivalent}.items():
            low, high = interval(total["found"], count)
            print(f"{total['found']} of {count} {kind}mutants found, ", end="")
            print(f"{total['found'] / count:.1%} ({low:.1%} to {high:.1%})")


def interval(count: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion."""
    z = 1.96
    middle = (count + z**2 / 2) / (trials + z**2)
    half = z / (trials + z**2) * math.sqrt(count * (trials - count) / trials + z**2 / 4)
    return middle - half, middle + half


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy is removed
    main()
