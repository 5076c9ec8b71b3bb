"""The programs with every file that they read spoiled at random: one line, or the right results.

Every case is a process with 2 GiB of memory beyond the imports and 60 seconds. MPIKFAC_SOAK=1 runs
more than 2,000 cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mpikfac.checkpoint import read_checkpoint
from mpikfac_apps import cli
from mpikfac_apps.guard.lock import Holder
from mpikfac_apps.inspecting import export, inspect
from mpikfac_apps.lab.predict import simulate
from mpikfac_apps.lab.study import compare, progress, spec, study
from mpikfac_apps.problems import datasets
from mpikfac_apps.training import train
from support import attacks
from support.cifar import python2_pickle
from support.pace import paced

SOAK = os.environ.get("MPIKFAC_SOAK") == "1"
MORE = 15 if SOAK else 1  # times as many cases
SECONDS = round(paced(60))
MEMORY = 2**31
OUTSIDE = b"mine"
QUICK = ("--batch=120", "--data.train_images=360", "--log_every=1", "--threads=1", "--epochs=2")
LAST, END = 3, 4  # the last step of the first start, and of the second
NEWEST = f"run/checkpoints/step-{LAST:09d}"
STUDY = {
    "name": "small",
    "options": {"batch": 120, "epochs": 2, "kfac.inv_update_steps": 1},
    "base": "config.yaml",
    "matrix": {"strategy": ["sgd"], "ranks": [1]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Return a folder with a file of every kind that a program reads."""
    folder = tmp_path_factory.mktemp("base")
    started = ("--checkpoint_every=1", "--trace_steps=1", f"--max_steps={LAST}")
    assert train.main([*QUICK, f"--run_dir={folder / 'run'}", *started]) == 0
    (folder / "run/checkpoints/starts.json").write_text('[{"step": 9, "digest": "", "starts": 1}]')
    (folder / "config.yaml").write_text(yaml.safe_dump({"lr": 0.1, "kfac": {"damping": 0.1}}))
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    machines = Path(simulate.mpikfac.predict.__file__).parent / "machines"
    shutil.copy(machines / "a100-hdr.json", folder / "machine.json")
    with contextlib.chdir(folder):  # of the path of the study's base
        (cell,) = spec.read(folder / "study.yaml").cells
    place = folder / "study/cells" / cell.directory
    shutil.copytree(folder / "run", place / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (place / "result.json").write_text('{"code": 0, "why": "", "seconds": 1.0, "cores": 1}')
    row = {"step": 3, "epoch": 1.0, "seconds": 1.0, "images_per_second": 9.0, "train_loss": 1.0}
    for run in (folder / "run", place / "run"):
        with open(run / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps(row | {"communication": 0.1, "test_accuracy": 0.5}) + "\n")
    write_images(folder / "data")
    holder = Holder("a" * 32, "node5", 1, "elsewhere", "1", "", "", "2026-01-01")
    (folder / "run/lock").write_text(json.dumps(dataclasses.asdict(holder)))
    os.utime(folder / "run/lock", (0, 0))
    (folder / "outside").write_bytes(OUTSIDE)
    return folder


def write_images(folder: Path) -> None:
    """Write data sets in both layouts of CIFAR-10, of few images."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(256, size=(20, 3072), dtype=np.uint8)
    labels = draw.integers(10, size=20, dtype=np.uint8)
    for layout in ("bin", "py"):
        place = folder / layout / f"cifar-10-batches-{layout}"
        place.mkdir(parents=True)
        for name in [*datasets.TRAIN_FILES, "test_batch"]:
            records = np.hstack([labels[:, None], pixels]).tobytes()
            (place / f"{name}.bin").write_bytes(records)
            (place / name).write_bytes(python2_pickle(labels, pixels))


def load_images(folder: Path) -> int:
    """Load the data set in a folder as the training program does."""
    datasets.CIFAR_RECORDS = 20
    return cli.run("data", lambda: 0 * len(datasets.load("cifar10", str(folder)).train_images))


def resumed(folder: Path) -> int:
    options = (f"--run_dir={folder / 'run'}", "--resume=auto", f"--max_steps={END}")
    return train.main([*QUICK, *options])


def resumed_from(folder: Path) -> int:
    options = (f"--run_dir={folder / 'new'}", f"--resume={folder / NEWEST}", f"--max_steps={END}")
    return train.main([*QUICK, *options])


def traced(folder: Path) -> int:
    options = (f"--run_dir={folder / 'run'}", "--resume=auto", "--trace_steps=1")
    return train.main([*QUICK, *options])


def configured(folder: Path) -> int:
    options = (f"--config={folder / 'config.yaml'}", f"--run_dir={folder / 'new'}")
    return train.main([*QUICK, *options, "--max_steps=1"])


def reported(folder: Path) -> int:
    os.chdir(folder)
    options = ("--run_dir", str(folder / "study"), "--report_only", "true")
    return study.main([str(folder / "study.yaml"), *options])


def predicted(folder: Path) -> int:
    options = ("--ranks", "16", "--model", "resnet50", "--strategy", "comm-opt")
    return simulate.main(["--machine", str(folder / "machine.json"), *options])


def inspected(folder: Path) -> int:
    return inspect.main([str(folder / "run")])


def exported(folder: Path) -> int:
    return export.main([str(folder / "run"), "--weights", str(folder / "weights.pt")])


def watched(folder: Path) -> int:
    os.chdir(folder)
    (cell,) = spec.read(folder / "study.yaml").cells
    part = progress.done_part(folder / "study/cells" / cell.directory / "run", cell)
    return 0 if 0 <= part <= 1 else 1


def exported_factors(folder: Path) -> int:
    return export.main([str(folder / "run"), "--factors", str(folder / "factors.npz")])


def compared(folder: Path) -> int:
    return compare.main([str(folder / "run")])


def pickled_images(folder: Path) -> int:
    return load_images(folder / "data/py")


def plain_images(folder: Path) -> int:
    return load_images(folder / "data/bin")


@dataclass(frozen=True)
class Target:
    """A file, its attacks, and the program that reads the file.

    Attributes:
        file: pattern of paths in the folder.
        codes: exit codes, except for 0, of which 1 tells damage.
        exact: after code 0, the state of the last step is that of the undisturbed run.
    """

    file: str
    program: Callable[[Path], int]
    kinds: Sequence[attacks.Attack]
    count: int
    codes: tuple[int, ...] = (2,)
    exact: bool = False


JSON = (attacks.change_json, attacks.change_json, attacks.replace, *attacks.BYTES)
LINES = (attacks.change_line, attacks.change_line, attacks.replace, *attacks.BYTES)
YAML = (attacks.change_yaml, attacks.change_yaml, attacks.replace, attacks.token, *attacks.BYTES)
RAW = (attacks.replace, attacks.replace, *attacks.BYTES)
SEALED = (attacks.change_manifest,)
MANIFEST, SHARD = f"{NEWEST}/manifest.json", f"{NEWEST}/shard-0.h5"
TARGETS = {
    "manifest": Target(MANIFEST, resumed, RAW, 10, exact=True),
    "shard": Target(SHARD, resumed, RAW, 10, exact=True),
    "starts": Target("run/checkpoints/starts.json", resumed, JSON, 8, exact=True),
    "lock": Target("run/lock", resumed, JSON, 8, exact=True),
    "files of a run": Target("run/*.*", resumed, RAW, 10, exact=True),
    "folder of checkpoints": Target("run/checkpoints", resumed, (attacks.replace,), 4, exact=True),
    "sealed manifest": Target(MANIFEST, resumed, SEALED, 12),
    "sealed shard": Target(SHARD, resumed, (attacks.change_shard,), 8),
    "inspected": Target(f"{NEWEST}/*", inspected, RAW, 6, (1, 2)),
    "inspected, sealed": Target(MANIFEST, inspected, SEALED, 10, (1, 2)),
    "exported, sealed": Target(MANIFEST, exported, SEALED, 6),
    "checkpoint by name": Target(f"{NEWEST}/*", resumed_from, RAW, 6),
    "checkpoint by name, sealed": Target(MANIFEST, resumed_from, SEALED, 6),
    "means of steps": Target("run/stages.json", traced, JSON, 4),
    "configuration of a run": Target("run/config.yaml", inspected, YAML, 8, (1, 2)),
    "factors, sealed": Target(MANIFEST, exported_factors, SEALED, 4),
    "configuration": Target("config.yaml", configured, YAML, 12),
    "base of a study": Target("config.yaml", reported, YAML, 4),
    "metrics of a cell": Target("study/cells/*/run/metrics.jsonl", reported, LINES, 6),
    "metrics of a running cell": Target("study/cells/*/run/metrics.jsonl", watched, LINES, 8),
    "study": Target("study.yaml", reported, YAML, 8),
    "metrics": Target("run/metrics.jsonl", compared, LINES, 12),
    "results of a study": Target("study/cells/*/*.json", reported, JSON, 4),
    "runs of a study": Target("study/cells/*/run/*.json*", reported, RAW, 4),
    "machine": Target("machine.json", predicted, JSON, 12),
    "pickled images": Target("data/py/*/*batch*", pickled_images, RAW, 10),
    "images": Target("data/bin/*/*.bin", plain_images, RAW, 4),
}


@dataclass(frozen=True)
class Ended:
    """The end of a process: exit code (negative: a signal), and printed text."""

    code: int
    out: str
    err: str


def ended(program: Callable[[Path], int], folder: Path) -> Ended:
    """Run a program on a folder in a process of its own, with little memory and time."""
    out, err = folder / "out.txt", folder / "err.txt"
    child = os.fork()
    if not child:
        code = 70
        try:
            for number, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
            bound()
            code = program(folder)
        except SystemExit as leave:
            code = leave.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    texts = (file.read_text(errors="backslashreplace") for file in (out, err))
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def bound() -> None:
    """Bound the memory and the time of this process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)


def state(folder: Path) -> dict[str, Any]:
    """Return the trained items of the last step."""
    found = read_checkpoint(folder / f"run/checkpoints/step-{END:09d}")
    return {name: found[name] for name in found if not name.startswith("run/")}


@pytest.fixture(scope="module")
def expected(base, tmp_path_factory) -> dict[str, Any]:
    """Return the state of the undisturbed run, after a check that all programs end well."""
    place = tmp_path_factory.mktemp("undisturbed")
    for program in {target.program: None for target in TARGETS.values()}:
        shutil.copytree(base, place / program.__name__)
        found = ended(program, place / program.__name__)
        assert (found.code, found.err) == (0, ""), found
    return state(place / resumed.__name__)


def faults(found: Ended, target: Target, folder: Path, expected: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the end of a program on a spoiled folder."""
    lines = found.err.splitlines()
    if found.code not in (0, *target.codes):
        yield f"code {found.code}"
    if "Traceback" in found.out + found.err:
        yield "a traceback"
    if found.code == 0 and any("manifest.json is missing" not in line for line in lines):
        yield "code 0, but text on stderr"
    if found.code == 2 and len(lines) != 1:
        yield f"{len(lines)} lines on stderr"
    if not all(line.isprintable() for line in (found.out + found.err).split("\n")):
        yield "text that moves the cursor"
    if (folder / "outside").read_bytes() != OUTSIDE:
        yield "a file outside was written"
    if target.exact and found.code == 0 and not same(state(folder), expected):
        yield "other numbers"


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether two states have the same bits."""
    return found.keys() == expected.keys() and all(
        torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        for name, value in expected.items()
    )


@pytest.mark.gate
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.timeout(1800)
def test_spoiled_files_are_one_line_or_change_nothing(base, expected, tmp_path, name) -> None:
    """Oracle: exit code, one printable line, the undisturbed run's bits, and a file outside."""
    target, wrong, began = TARGETS[name], [], time.monotonic()
    count = target.count * MORE
    for number in range(count):
        chance = random.Random(f"{name} {number}")
        folder = tmp_path / "folder"
        shutil.copytree(base, folder)
        file = chance.choice(sorted(folder.glob(target.file)))
        done = chance.choice(target.kinds)(file, chance)
        if name == "lock" and file.is_file():
            os.utime(file, (0, 0))
        found = ended(target.program, folder)
        for fault in faults(found, target, folder, expected):
            told = f"{found.out[-300:]}{found.err[-2000:]}"
            wrong.append(f"{number}: {file.relative_to(folder)}: {done}: {fault}\n{told}")
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    print(f"{name}: {count} mutations, {len(wrong)} failures, {seconds:.0f} s")
    assert not wrong, "\n\n".join(wrong[:10])
