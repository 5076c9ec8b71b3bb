"""The page about long runs names the contents of a run directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mpikfac_apps.training import train

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "long_runs.md"
QUICK = ("--batch=120", "--data.train_images=1200", "--epochs=2", "--threads=1")


def test_files_and_metrics_of_a_run_are_in_its_tables(tmp_path):
    """Oracle: a run's directory, and the keys of the run's metrics."""
    more = ("--trace_steps=2", "--strategy=event-driven", f"--run_dir={tmp_path}")
    assert train.main([*QUICK, *more]) == 0
    section = PAGE.read_text().partition("## The run directory\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    files = {path.name + "/" * path.is_dir() for path in tmp_path.iterdir()}
    assert files <= named
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    assert "decompositions" in keys
    fields = {name for name in named - {"lock", "tracking_id"} if name.isidentifier()}
    others = {f"{half}_{key}" for half in ("train", "test") for key in ("error", "bits_per_byte")}
    assert keys | others | {"troubles", "staleness"} == fields
