"""Warnings of the training program: a network that ends in a softmax, and a loss that grows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpikfac_apps.problems import models
from mpikfac_apps.training import train

IMAGES = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)
LINEAR = """
from torch import nn

def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


class Ends(nn.Module):
    """A linear layer, and a function of the layer's outputs."""

    def __init__(self, end) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(64, 10), end

    def forward(self, images):
        return self.end(self.linear(images.flatten(1)))


@pytest.mark.parametrize(
    ("end", "made"),
    [
        (nn.Softmax(1), "probabilities"),
        (nn.LogSoftmax(1), "log-probabilities"),
        (lambda scores: scores.softmax(1), "probabilities"),
        (lambda scores: scores.bfloat16().log_softmax(1), "log-probabilities"),
        (nn.Identity(), ""),
        (nn.Sigmoid(), ""),
        (lambda scores: 0 * scores, ""),
        (lambda scores: -scores.square(), ""),
    ],
)
def test_a_softmax_at_the_end_is_named(end, made):
    """Oracle: the last function, by hand; a softmax need not be a module."""
    torch.manual_seed(0)
    words = models.check("my.py:net", Ends(end), IMAGES, 10)
    expected = f"model=my.py:net returns {made}, but cross entropy applies softmax itself; "
    assert words.startswith(expected) if made else words == ""


@pytest.mark.parametrize(("rate", "warnings"), [(1000.0, 1), (0.1, 0)])
def test_a_loss_that_grows_a_thousandfold_is_one_warning(tmp_path, rate, warnings):
    """Oracle: a linear network, whose loss grows by about the rate after one step of SGD."""
    (tmp_path / "linear.py").write_text(LINEAR)
    options = (f"--model={tmp_path}/linear.py:build", "--optimizer=sgd", f"--lr={rate}")
    steps = ("--max_steps=6", "--log_every=1", "--batch=120", "--momentum=0", "--threads=1")
    assert train.main([*options, *steps, f"--run_dir={tmp_path / 'run'}"]) == 0
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert len([line for line in lines if f"try an lr below {rate}" in line]) == warnings
