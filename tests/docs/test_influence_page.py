"""The script on the page about influence runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import mpikfac
from support.curved import F64, network, trained

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "influence.md"


def test_the_script_scores_examples(tmp_path, monkeypatch):
    """Oracle: shapes by hand; an example helps itself most, as the queries are examples."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    kfac = trained(network())
    mpikfac.save_checkpoint(mpikfac.world(), "runs/a/checkpoints", kfac.state_dict(), kfac.steps)
    images, labels = torch.randn(12, 2, 3, 3, dtype=F64), torch.randint(3, (12,))
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {
        "model": network(),
        "batches": list(zip(images.split(5), labels.split(5))),
        "queries": (images[:2], labels[:2]),
    }
    exec(program, names)
    assert names["scores"].shape == (2, 12)
    assert (names["scores"].diagonal() > 0).all()
    assert names["helpful"].shape == names["suspects"].shape == (5,)
    assert names["samples"]["0.weight"].shape == (8, 4, 1, 2, 2)
