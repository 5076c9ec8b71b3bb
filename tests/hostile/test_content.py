"""Checkpoints with right digests and wrong content: one line, code 2, and nothing is written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpikfac
from mpikfac.checkpoint import read_checkpoint
from mpikfac_apps.training import train

pytestmark = pytest.mark.gate

QUICK = (
    *(
        "--batch=120",
        "--data.train_images=360",
        "--log_every=1",
        "--threads=1",
        "--refresh.staleness=1",
    ),
    "--kfac.grafting.orthogonalize=false",
)
OF_DIRECTIONS, OF_GRADIENTS = ("--kfac.momentum_of=directions",), ("--kfac.momentum_of=gradients",)
Items = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the directory of a run of two steps, with a checkpoint of the second."""
    return two_steps(tmp_path_factory.mktemp("finished") / "run", OF_DIRECTIONS)


def two_steps(run: Path, more: tuple[str, ...]) -> Path:
    assert train.main([*QUICK, *more, f"--run_dir={run}", "--max_steps=2"]) == 0
    return run


def first(items: Items, part: str) -> str:
    return min(name for name in items if part in name)


def data(**changes: object) -> Callable[[Items], Items]:
    """Return a change of what the checkpoint says about its run."""

    def change(items: Items) -> Items:
        return {"run/data": json.dumps(json.loads(items["run/data"]) | changes)}

    return change


WEIGHT, MOMENTUM = torch.zeros(3), torch.zeros(1, 2, 3)
CHANGES: dict[str, Callable[[Items], Items]] = {
    "run: no JSON": lambda items: {"run/data": "{"},
    "run: list": lambda items: {"run/data": "[1]"},
    "run: deep": lambda items: {"run/data": "[" * 10**5},
    "run: number": lambda items: {"run/data": 3},
    "run: tensor": lambda items: {"run/data": WEIGHT},
    "run: nothing": lambda items: {"run/data": "{}"},
    "run: ranks as text": data(ranks="1"),
    "run: no ranks": data(ranks=0),
    "run: many ranks": data(ranks=10**9),
    "run: batch as list": data(batch=[120]),
    "run: another batch": data(batch=60),
    "run: escape": data(model="\x1b[2J\n"),
    "seconds as text": lambda items: {"run/seconds": "1"},
    "seconds of no number": lambda items: {"run/seconds": math.nan},
    "negative seconds": lambda items: {"run/seconds": -1.0},
    "bytes as text": lambda items: {"run/metrics_bytes": "1"},
    "negative bytes": lambda items: {"run/metrics_bytes": -1},
    "bytes as fraction": lambda items: {"run/metrics_bytes": 0.5},
    "lines as number": lambda items: {"run/metrics_waiting": 1},
    "counts as number": lambda items: {"run/counted": 1},
    "counts of another shape": lambda items: {"run/counted": torch.zeros(1).double()},
    "counts of another dtype": lambda items: {"run/reported": torch.zeros(3)},
    "steps as text": lambda items: {"trainer/steps": "2"},
    "steps as tensor": lambda items: {"trainer/steps": WEIGHT},
    "steps as fraction": lambda items: {"trainer/steps": 2.0},
    "steps of no number": lambda items: {"trainer/steps": math.nan},
    "negative steps": lambda items: {"trainer/steps": -1},
    "other steps": lambda items: {"trainer/steps": 1},
    "huge steps": lambda items: {"trainer/steps": 2**62},
    "weight as text": lambda items: {first(items, "model/"): "1"},
    "weight of another shape": lambda items: {first(items, "model/"): WEIGHT},
    "weight of another dtype": lambda items: {first(items, "model/"): WEIGHT.double()},
    "momentum as text": lambda items: {first(items, "momentum_buffer"): "1"},
    "momentum of another shape": lambda items: {first(items, "momentum_buffer"): MOMENTUM},
    "momentum of whole numbers": lambda items: {first(items, "momentum_buffer"): WEIGHT.long()},
    "optimizer as tensor": lambda items: {"optimizer/name": WEIGHT},
    "another optimizer": lambda items: {"optimizer/name": "\x1b[2J\n"},
    "rate of no number": lambda items: {"optimizer/groups/0/lr": math.inf},
    "rate as tensor": lambda items: {"optimizer/groups/0/lr": WEIGHT},
    "factor as text": lambda items: {first(items, "kfac/factors/"): "1"},
    "factor of another shape": lambda items: {first(items, "kfac/factors/"): WEIGHT},
    "basis of another shape": lambda items: {first(items, "kfac/bases/"): WEIGHT},
    "average of another shape": lambda items: {first(items, "kfac/graft/"): MOMENTUM},
    "due as text": lambda items: {"kfac/due": "1"},
    "due of no number": lambda items: {"kfac/due": math.nan},
}
NEEDED = ("run/data", "run/seconds", "run/metrics_bytes", "run/counted", "trainer/steps", "model/")


def altered(finished: Path, run: Path, change: Callable[[Items], Items]) -> bytes:
    """Copy a run with changed items in the checkpoint; return the bytes of the metrics."""
    shutil.copytree(finished, run)
    path = run / "checkpoints" / "step-000000002"
    items = dict(read_checkpoint(path))
    changed = {name: value for name, value in (items | change(items)).items() if value is not None}
    mpikfac.save_checkpoint(mpikfac.world(), run / "checkpoints", changed, 2)
    return (run / "metrics.jsonl").read_bytes()


def refused(
    run: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...] = OF_DIRECTIONS
) -> str:
    """Return the line with which a start in the directory ends, with code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main([*QUICK, *more, f"--run_dir={run}", "--resume=auto", "--max_steps=3"])
    assert leave.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.isprintable() and line.startswith("mpikfac: reading checkpoint ")
    return line


@pytest.mark.parametrize("name", CHANGES)
def test_content_that_no_run_writes(finished, tmp_path, capfd, name) -> None:
    """Oracle: one printable line with the checkpoint, code 2; the metrics stay."""
    before = altered(finished, tmp_path / "run", CHANGES[name])
    line = refused(tmp_path / "run", capfd)
    assert "step-000000002" in line and len(line) < 1000
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("wrong", ["1", MOMENTUM, WEIGHT.long()], ids=["text", "shape", "dtype"])
def test_momenta_of_gradients_that_no_run_writes(tmp_path, capfd, wrong) -> None:
    """Oracle: the name of the item in the line."""
    run = two_steps(tmp_path / "finished", OF_GRADIENTS)
    name = first(dict(read_checkpoint(run / "checkpoints" / "step-000000002")), "kfac/momentum/")
    altered(run, tmp_path / "run", lambda items: {name: wrong})
    assert name in refused(tmp_path / "run", capfd, OF_GRADIENTS)


@pytest.mark.parametrize("part", NEEDED)
def test_content_that_lacks_an_item(finished, tmp_path, capfd, part) -> None:
    """Oracle: the name of the item in the line."""
    name = first(dict(read_checkpoint(finished / "checkpoints" / "step-000000002")), part)
    altered(finished, tmp_path / "run", lambda items: {name: None})
    assert name in refused(tmp_path / "run", capfd)


def test_a_checkpoint_past_the_end_of_the_run_is_refused(finished, tmp_path, capfd) -> None:
    """Oracle: both steps in the line; the run to the same step has nothing to do."""
    run = shutil.copytree(finished, tmp_path / "run")
    options = [*QUICK, *OF_DIRECTIONS, f"--run_dir={run}", "--resume=auto"]
    with pytest.raises(SystemExit):
        train.main([*options, "--max_steps=1"])
    assert "it has step 2, but this run ends at step 1; raise max_steps" in capfd.readouterr().err
    assert train.main([*options, "--max_steps=2"]) == 0
