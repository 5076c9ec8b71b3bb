"""Runs in which a rank changes by itself what all ranks hold: the run ends, and a restart heals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpikfac
from support.launch import TRAIN, launch

pytestmark = pytest.mark.gate

OPTIONS = ("--batch=120", "--data.train_images=360", "--epochs=3", "--threads=1", "--log_every=1")
DRIFTS = """
import sys
import mpikfac
from mpikfac_apps.training import run, train

take = run.Run.take

def drifting(self, step):
    take(self, step)
    if step == 2 and self.comm.rank == 1:
        next(self.trainer.model.parameters()).data.view(-1)[0] += 1e-6

run.Run.take = drifting
sys.exit(train.main(sys.argv[1:]))
"""


def losses(run: Path) -> list[tuple[int, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_a_run_whose_ranks_differ_ends_at_the_next_checkpoint(tmp_path) -> None:
    """Oracle: the rows of the undisturbed run, after a restart without options."""
    program, run = tmp_path / "drifts.py", tmp_path / "run"
    program.write_text(DRIFTS)
    every = "--checkpoint_every=2"
    ended = launch(2, str(program), *OPTIONS, every, f"--run_dir={run}", "--optimizer=sgd")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("mpikfac")]
    assert ended.returncode == 2 and len(lines) == 1, ended.stderr
    assert "item 'model/0.weight' has different values on rank 1 and rank 0" in lines[0]
    assert "restart it with --resume auto to continue" in lines[0]
    assert mpikfac.checkpoint.latest_checkpoint(run / "checkpoints").name == "step-000000002"
    assert launch(2, *TRAIN, f"--run_dir={run}", "--resume=auto").returncode == 0
    whole = tmp_path / "whole"
    assert launch(2, *TRAIN, *OPTIONS, f"--run_dir={whole}", "--optimizer=sgd").returncode == 0
    assert losses(run) == losses(whole)
