"""The scripts on the page about influence run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mpikfac
from support.curved import F64, network, trained

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "influence.md"


def test_the_scripts_score_examples(tmp_path, monkeypatch):
    """Oracle: shapes by hand; an example helps itself most, as the queries are examples."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    kfac = trained(network())
    state, world = kfac.state_dict(), mpikfac.world()
    mpikfac.save_checkpoint(world, "runs/a/checkpoints", state, kfac.steps)
    for step in (100, 300, 500):
        mpikfac.save_checkpoint(world, "kept", state, step, keep=3)
    images, labels = torch.randn(12, 2, 3, 3, dtype=F64), torch.randint(3, (12,))
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {
        "model": network(),
        "build": network,
        "examples": 12,
        "batches": list(zip(images.split(5), labels.split(5))),
        "queries": (images[:2], labels[:2]),
    }
    exec("\n".join(programs), names)
    assert names["scores"].shape == (2, 12)
    assert (names["scores"].diagonal() > 0).all()
    assert names["helpful"].shape == names["suspects"].shape == (5,)
    assert names["along"].shape == (2, 12)
    assert (names["along"].diagonal() > 0).all()
    assert names["samples"]["0.weight"].shape == (8, 4, 1, 2, 2)
