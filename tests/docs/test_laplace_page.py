"""The script on the page about uncertainty runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.curved import F64, network

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "laplace.md"


def test_the_script_predicts():
    """Oracle: probabilities sum to 1; uncertain weights make them less certain than the mode's."""
    torch.manual_seed(0)
    model, images = network().eval(), torch.randn(30, 2, 3, 3, dtype=F64)
    labels = model(images).argmax(1)
    names = {
        "model": model,
        "batches": list(zip(images.split(8), labels.split(8))),
        "examples": 30,
        "images": images[:5],
    }
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(program, names)
    mode = model(images[:5]).softmax(1)
    for name in ("linear", "sampled"):
        torch.testing.assert_close(names[name].sum(1), torch.ones(5, dtype=F64))
    assert (names["linear"].amax(1) < mode.amax(1)).all()
    assert names["prior"] > 0 > names["evidence"]
