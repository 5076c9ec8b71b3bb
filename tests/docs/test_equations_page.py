"""The script on the page about equations runs as it is printed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import mpikfac

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "equations.md"


def test_the_script_solves_the_equation():
    """Oracle: the exact solution at other points."""
    torch.manual_seed(0)
    names = {}
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(program, names)
    points = torch.rand(500, 2).double()
    exact = (math.pi * points).sin().prod(1)
    with torch.no_grad():
        error = (names["model"](points)[:, 0] - exact).norm() / exact.norm()
    assert error < 0.01


def test_all_functions_of_jets_are_named():
    """Oracle: the rules; words of the page stand for operations."""
    text = PAGE.read_text()
    words = {"square": "powers", "pow": "powers", "reciprocal": "quotients"}
    assert [
        name for name in mpikfac.lab.Jet.rules if words.get(name, f"`{name}`") not in text
    ] == []
