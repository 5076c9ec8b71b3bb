"""The block about torch's profiler runs unchanged."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import torch

import mpikfac

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "trace.md"


def test_the_profiler_sees_the_steps(tmp_path, monkeypatch, capsys):
    """Oracle: torch's own names of two steps of four, and of the products of preconditioning."""
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (code for code in codes if "profiler" in code)
    comm, model = mpikfac.world(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    known = {
        "comm": comm,
        "model": model,
        "optimizer": optimizer,
        "kfac": mpikfac.KFAC(model, optimizer, comm),
        "loader": [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,)))] * 4,
    }
    exec(code, known)
    assert known["kfac"].steps == 4
    assert "aten::" in capsys.readouterr().out
    with gzip.open(tmp_path / "profile-0.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }
    assert any(name in names for name in ("aten::mm", "aten::addmm"))
