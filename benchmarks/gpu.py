"""Measure K-FAC on the GPU of this machine, part by part, and print the results as a table.

    python benchmarks/gpu.py FOLDER                 measures what has no result in FOLDER yet
    TRIAL=1 python benchmarks/gpu.py FOLDER         tiny sizes, for any device: all parts run
    python benchmarks/gpu.py FOLDER --table         prints the results in FOLDER as Markdown

A part writes its result to FOLDER/PART.json and its output to FOLDER/PART.txt. A part that fails or
exceeds its limit writes no result and reports this in one line, and the other parts continue. SGD
and K-FAC are measured alternately in each part. Only the library is needed: the parts leave out
kfac-pytorch if Python finds no package `kfac`, and the part `before` if the variable BASE names no
older checkout. MPIRUN and MPIRUN_FLAGS set the launcher of the parts with two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TRIAL = bool(os.environ.get("TRIAL"))
SLOW = 10  # times longer that a trial can take, as it can run on any machine
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
REASON = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")  # the last line of a traceback


class Part(NamedTuple):
    """A measurement: a function of gpu_parts.py, in a separate process or job.

    Attributes:
        name: of the part and its result.
        seconds: the time limit of the part.
        measures: the function.
        ranks: of the job; 0 for a process without MPI's launcher.
        checkout: the library and the programs that are measured; None if there is no such checkout.
    """

    name: str
    seconds: int
    measures: str
    ranks: int = 0
    checkout: Path | None = ROOT

    def command(self, folder: Path) -> list[str]:
        """Return the command that measures the part into the folder."""
        program = [str(ROOT / "benchmarks" / "gpu_parts.py"), self.measures, str(self.file(folder))]
        if not self.ranks:
            return [sys.executable, *program]
        mpirun = [os.environ.get("MPIRUN") or beside_python("mpirun")]
        flags = os.environ.get("MPIRUN_FLAGS", "--oversubscribe").split()
        return [*mpirun, *flags, "-n", str(self.ranks), sys.executable, "-m", "mpi4py", *program]

    def file(self, folder: Path) -> Path:
        """Return the file of the result."""
        return folder / f"{self.name}.json"


BASE = Path(os.environ["BASE"]).resolve() if os.environ.get("BASE") else None
PARTS = (
    Part("health", 40, "health", ranks=2),
    Part("ordinary", 85, "ordinary"),
    Part("compiled_small", 40, "compiled_small"),
    Part("compiled", 90, "compiled"),
    Part("eager", 40, "eager"),
    Part("before", 40, "eager", checkout=BASE),
    Part("captured", 60, "captured"),
    Part("factors", 65, "factors"),
    Part("orders", 65, "orders"),
    Part("peer", 70, "peer"),
    Part("final", 95, "final"),
    Part("final_small", 40, "final_small"),
    Part("ranks", 60, "ranks", ranks=2),
)


def main() -> None:
    """Measure the parts, or print the table alone; the exit code is 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--table", action="store_true", help="print the results, measure nothing")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    failed = 0 if options.table else measure(chosen, folder)
    print("\n".join(table([part.file(folder) for part in chosen])))
    sys.exit(failed)


def measure(parts: Sequence[Part], folder: Path) -> bool:
    """Measure the parts without a result, one after the other; return whether a part has failed."""
    failed = False
    for part in parts:
        if part.checkout is None:
            ended = "left out: BASE names no older checkout"
        elif (result := read(part.file(folder))) and result["trial"] == TRIAL:
            ended = "has a result"
        else:
            ended, worked = measured(part, folder)
            failed |= not worked
        print(f"{part.name}: {ended}", flush=True)
    return failed


def measured(part: Part, folder: Path) -> tuple[str, bool]:
    """Measure a part; return how the part ended, in a line, and whether there is a result."""
    limit = part.seconds * (SLOW if TRIAL else 1)
    text, start = folder / f"{part.name}.txt", time.monotonic()
    older = os.environ.get("PYTHONPATH")
    paths = [str(part.checkout), str(part.checkout / "apps"), *([older] if older else [])]
    root = dict.fromkeys(AS_ROOT, "1") if os.geteuid() == 0 else {}
    env = {"OMP_NUM_THREADS": "1", **root, **os.environ, "PYTHONPATH": ":".join(paths)}
    with text.open("w") as output:
        code = subprocess.run(
            ["timeout", "--kill-after=10", str(limit), *part.command(folder)],
            env=env,
            cwd=ROOT,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ).returncode
    seconds = f"{time.monotonic() - start:.0f} s"
    if code == 0:
        return f"measured in {seconds}", True
    if code in (124, 137):
        return f"passed its limit of {limit} s", False
    lines = [line for line in text.read_text(errors="replace").splitlines() if line.strip(" -=*")]
    reason = next((line for line in lines if REASON.match(line)), (lines or ["no output"])[-1])
    return f"failed after {seconds}: {reason.strip()}; see {text}", False


def beside_python(program: str) -> str:
    """Return the program next to Python, or the one on PATH."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else program


def read(file: Path) -> dict[str, Any] | None:
    """Return a result; None without one."""
    return json.loads(file.read_text()) if file.exists() else None


# -- the table -----------------------------------------------------------------------------------


def table(files: Sequence[Path]) -> list[str]:
    """Return the results as Markdown: a table for each part."""
    lines: list[str] = []
    for file in files:
        if result := read(file):
            place = result["environment"]
            commit = (place["commit"] or "")[:7] or "no commit"
            trial = "TRIAL, figures mean nothing; " if result["trial"] else ""
            lines += [
                "",
                f"**{file.stem}**: {trial}{place['device']}, {place['started'][:10]}, "
                f"torch {place['packages']['torch']}, {commit}",
                "",
                "| case | ms of a step | over the base | device ms | kernels | waits | MB |",
                "|---|---|---|---|---|---|---|",
                *rows_of(result["rows"]),
            ]
    return lines


def rows_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a part's table."""
    by_name = {row["name"]: row for row in rows}
    lines = []
    for row in rows:
        if "missing" in row or "note" in row:
            lines.append(f"| {row['name']} | {row.get('missing') or row['note']} | | | | | |")
            continue
        cells = [
            spread(row["wall_ms"], 2),
            over(row, by_name.get(row.get("base"))),
            *(number(row.get(what)) for what in ("device_ms", "kernels", "waits", "memory_mb")),
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
        if stages := row.get("stages_ms"):
            text = ", ".join(f"{stage} {ms:.2f}" for stage, ms in stages.items())
            lines.append(f"| its stages | {text} | | | | | |")
    return lines


def spread(samples: Sequence[float], digits: int) -> str:
    """Return the median of samples, and in brackets the lowest and the highest."""
    low, high = min(samples), max(samples)
    return f"{statistics.median(samples):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def over(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    """Return the ratios to the base, round by round; "" for the base itself, or without a base."""
    if base is None or base is row or "wall_ms" not in base:
        return ""
    return spread([mine / its for mine, its in zip(row["wall_ms"], base["wall_ms"])], 3)


def number(value: float | None) -> str:
    """Return a number; "" if there is none."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


if __name__ == "__main__":
    main()
