"""The README is short, has a picture, and the example runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def test_usage_example_trains(monkeypatch) -> None:
    """Oracle: three steps on a batch of digits-like images lower the loss."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 15
    torch.manual_seed(0)
    batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    losses = []

    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        losses.append(original(*arguments))
        return losses[-1]

    original = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    exec(example, {"loader": [batch] * 3})
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_readme_is_short_and_has_a_picture() -> None:
    """Oracle: the number of lines, and the file of the picture."""
    text = README.read_text()
    assert len(text.splitlines()) <= 105
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert "<svg" in (README.parent / picture).read_text()
