"""Measure the mutation score of the core: the share of random changes that make a test fail.

    pip install cosmic-ray
    PYTHONPATH=tests python tests/programs/mutation_score.py [--sample 150] [--seed 0] [--out DIR]

The program works on a copy of the last commit. First, the quick tests in `FOLDERS` run on unchanged
code, once with coverage, which records the tests that execute each line, and once in the order of
their duration. Tests that fail in either run are named, and dropped. Then random places of the
core are drawn, and each gets one of Cosmic Ray's mutations: another comparison or arithmetic
operator, a number that is one off, `and` for `or`, `not`, no decorator, a loop without iterations,
another exception. A mutant is tried by all tests that execute the line, the quickest first, until
one fails or takes several times as long as before. The tests on two ranks follow if the tests of
one process find nothing. A line that runs on import, such as a constant or a default value, is
tried by the tests that execute functions of its file, or else of its folder.

The score is the share of mutants found among those whose line the tests execute. Programs that
tests start in processes of their own are not traced. Each mutant is a row of DIR/mutants.jsonl; a
second run continues with the missing ones. Delete rows to try their mutants again, and add a field
"equivalent", with the reason, to a survivor that no test can find.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import itertools
import json
import math
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
from typing import NamedTuple

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from programs import mutations
from programs.mutations import FAILURE, ROOT
from support.pace import paced

CORE = ("numerics", "layers", "preconditioners", "engine", "plan", "comm", "model")
CORE += ("kfac.py", "optimizer.py", "trainer.py")
FOLDERS = {1: ("tests/unit", "tests/property"), 2: ("tests/mpi",)}  # by ranks
SLOWER = 5  # how many times longer than on unchanged code a mutant's test may take
START = 30  # seconds that a start of pytest may take
SECONDS = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.+?)\s*$", re.MULTILINE)
Row = dict[str, str | int]


class Mutant(NamedTuple):
    """A change of a file in `mpikfac/`."""

    file: str
    line: int
    operator: str
    source: str

    def diff(self, right: str) -> str:
        """Return the removed and the added lines."""
        lines = difflib.unified_diff(right.splitlines(), self.source.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def main() -> None:
    """Try the mutants that are not in the results, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutation_score")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "mutants.jsonl"
    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["file"], row["line"], row["diff"]): row for row in old}
    rows = []
    with copied() as copy, chdir(copy):
        tests = Tests(copy, out)
        for mutant in itertools.islice(drawn(copy, options.seed), options.sample):
            path = copy / "mpikfac" / mutant.file
            right = path.read_text()
            key = mutant.file, mutant.line, mutant.diff(right)
            if key not in known:
                path.write_text(mutant.source)  # newer than compiled files of older texts
                known[key] = dict(zip(("file", "line", "diff"), key)) | tests.tried(mutant, right)
                path.write_text(right)
                with file.open("a") as opened:
                    print(json.dumps(known[key]), file=opened)
                print(" | ".join(map(str, known[key].values())).replace("\n", "  "), flush=True)
            rows.append(known[key])
        report(rows)
        print(f"coverage of the core, by these tests: {100 * tests.covered():.1f} %")


@contextmanager
def copied() -> Iterator[Path]:
    """Return a folder with the tracked files of the last commit; it is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        with tarfile.open(fileobj=io.BytesIO(files.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


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
            yield Mutant(file, start[0], name, wrong)


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


class Tests:
    """The tests that pass on unchanged code, with their durations and the lines that they execute.

    Args:
        copy: the copy of the repository.
        out: the folder of the measurement, which is repeated if there is a new commit.
    """

    def __init__(self, copy: Path, out: Path) -> None:
        self._copy = copy
        self._list = out / "tests.txt"
        file, settings = out / "unchanged.json", out / "coverage.ini"
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        stored = json.loads(file.read_text()) if file.exists() else {}
        if stored.get("commit") != commit:
            (out / "lines").unlink(missing_ok=True)
            stored = {"commit": commit, "seconds": {}, "dropped": []}
            for ranks, folders in FOLDERS.items():
                data = f"{out}/lines.{ranks}.${{OMPI_COMM_WORLD_RANK-0}}"
                settings.write_text(
                    f"[run]\nsource = mpikfac\nrelative_files = True\ndata_file = {data}\n"
                )
                counted = (
                    "--cov",
                    "--cov-report=",
                    "--cov-context=test",
                    f"--cov-config={settings}",
                )
                workers = ("-n2",) if ranks == 1 else ()
                chosen = (*workers, "-m", "not slow and not gate", *folders)
                dropped: set[str] = set()
                seconds = self._passing(ranks, [*counted, *chosen], dropped)
                seconds = self._passing(ranks, [self._listed(seconds)], dropped)
                stored["seconds"][str(ranks)] = seconds
                stored["dropped"] += sorted(dropped)
            file.write_text(json.dumps(stored))
        self._seconds: dict[int, dict[str, float]] = {
            int(ranks): seconds for ranks, seconds in stored["seconds"].items()
        }
        self._coverage = coverage.Coverage(str(out / "lines"), config_file=str(settings))
        self._coverage.combine(map(str, out.glob("lines.?.?")), keep=True)
        for ranks, seconds in self._seconds.items():
            print(f"{len(seconds)} tests on {ranks} ranks: {sum(seconds.values()):.0f} s")
        print("dropped, because they fail on unchanged code:", stored["dropped"], flush=True)

    def _passing(self, ranks: int, chosen: Iterable[str], dropped: set[str]) -> dict[str, float]:
        """Return the seconds of each test that passes; add the other tests to `dropped`."""
        while True:
            left_out = (f"--deselect={test}" for test in dropped)
            # If a test fails on one rank, the other ranks may wait in it.
            stop = ["-x"] if ranks > 1 else []
            arguments = ("-vv", "--durations=0", *stop, *left_out, *chosen)
            code, text = mutations.output(self._copy, arguments, ranks, paced(3600))
            failing = set(FAILURE.findall(text))
            dropped |= failing
            if code == 0 or (failing and ranks == 1):
                break
            if not failing:
                raise SystemExit(f"the tests end with exit code {code}:\n{text[-3000:]}")
        seconds: Counter[str] = Counter()
        for taken, test in SECONDS.findall(text):
            seconds[test] += float(taken)
        return {test: seconds[test] for test in seconds if test not in dropped}

    def _listed(self, seconds: dict[str, float]) -> str:
        """Write a list of tests, the quickest first; return pytest's argument for the list."""
        self._list.write_text("\n".join(sorted(seconds, key=seconds.__getitem__)))
        return f"@{self._list}"

    def covered(self) -> float:
        """Return the share of the core's statements that the tests execute."""
        counts: Counter[str] = Counter()
        for file in core(self._copy):
            _, lines, _, missing, _ = self._coverage.analysis2(f"mpikfac/{file}")
            counts.update(lines=len(lines), missing=len(missing))
        return 1 - counts["missing"] / counts["lines"]

    def tried(self, mutant: Mutant, right: str) -> Row:
        """Run the tests of a mutant; return the result, and the test that finds the mutant."""
        chosen = self._executing(mutant.file, mutant.line, right)
        for ranks, known in self._seconds.items():
            seconds = {test: known[test] for test in chosen & known.keys()}
            if not seconds:
                continue
            limit = f"--timeout={START + SLOWER * max(seconds.values()):.0f}"
            stop = ("-x", limit, "-o", "timeout_method=thread")
            most = paced(2 * START + SLOWER * sum(seconds.values()))
            tests = [self._listed(seconds)]
            code, text = mutations.output(self._copy, (*stop, *tests), ranks, most)
            if code == 4:  # pytest finds no such test: the change has renamed a case
                tests = list(dict.fromkeys(test.partition("[")[0] for test in seconds))
                code, text = mutations.output(self._copy, (*stop, *tests), ranks, most)
            if code != 0:
                failing = FAILURE.search(text)
                ended = "time limit" if code is None else f"exit code {code}"
                return {"result": "found", "ranks": ranks, "by": failing[1] if failing else ended}
        return {"result": "survives" if chosen else "not executed"}

    def _executing(self, file: str, line: int, source: str) -> set[str]:
        """Return the tests that execute the statement at a line of unchanged code."""
        parts = list(statements(ast.parse(source)))
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
        contexts = self._coverage.get_data().contexts_by_lineno(f"mpikfac/{file}")
        return {
            line: {one.rpartition("|")[0] for one in names} - {""}
            for line, names in contexts.items()
        }


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


def report(rows: list[Row]) -> None:
    """Print the score with its 95 % interval, by package and in total, and the survivors."""
    packages = defaultdict(Counter)
    for row in rows:
        packages[str(row["file"]).partition("/")[0]][row["result"]] += 1
    for name, results in sorted(packages.items()):
        print(f"{name}: {dict(results)}")
    total = sum(packages.values(), Counter())
    for row in rows:
        if row["result"] == "survives":
            print(f"\n{row['file']}:{row['line']} {row.get('equivalent', '')}\n{row['diff']}")
    print(f"\n{total['not executed']} of {len(rows)} mutants are in lines that no test executes")
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
