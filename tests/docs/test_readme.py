"""The README is short, has a picture, and the example runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_usage_example_trains(monkeypatch) -> None:
    """Oracle: four steps on a batch of digits-like images lower the loss."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    batch = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    losses = []

    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        losses.append(original(*arguments))
        return losses[-1]

    original = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    exec(example, {"model": nn.Sequential(*layers), "loader": [batch] * 2})
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_readme_names_the_two_commands_and_has_a_picture() -> None:
    """Oracle: the scripts, and the file of the picture."""
    text = README.read_text()
    for script in ("jobs/quickstart.sh", "jobs/test.sh"):
        assert f"bash {script}" in text and (README.parent / script).exists()
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert "<svg" in (README.parent / picture).read_text()


def test_the_check_of_a_change_begins_with_the_commands_of_the_readme() -> None:
    """Oracle: the section Install; what `.ci/run` does before it installs anything itself."""
    section = README.read_text().partition("## Install")[2].partition("## ")[0]
    commands = re.findall(r"^bash (\S+)", section, re.MULTILINE)
    before = (ROOT / ".ci" / "run").read_text().partition("\ninstall ")[0]
    assert len(commands) == 2
    assert 'rm -rf "$VENV"' in before
    assert f"for script in {' '.join(commands)}; do" in before
