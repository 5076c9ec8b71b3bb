"""The page for users of other libraries: its program runs, and its arguments exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torch import nn

import mpikfac

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "coming_from.md").read_text()


def test_the_published_algorithm_takes_a_step():
    """Oracle: the published settings in the plan and in the state; a change of all weights."""
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (code,) = (code for code in codes if "kl=" in code)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [parameter.clone() for parameter in model.parameters()]
    known = {"mpikfac": mpikfac, "torch": torch, "model": model, "comm": mpikfac.world()}
    exec(code, known)
    kfac = known["kfac"]
    nn.functional.cross_entropy(model(torch.randn(8, 4, 4)), torch.randint(3, (8,))).backward()
    kfac.step()
    assert (kfac.plan.solver, kfac.plan.strategy.transport.packing) == ("eigen", "square")
    assert kfac.kl_scale.item() <= 1
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_the_arguments_of_the_page_exist():
    """Oracle: the signatures."""
    named = set(re.findall(r"\b(?:mpikfac\.)?([A-Z]\w+)\((?:\w+, )?(\w+)=", PAGE))
    named = {(name, argument) for name, argument in named if hasattr(mpikfac, name)}
    assert {("Length", "kl"), ("Coverage", "skip"), ("HybridOpt", "grad_worker_fraction")} <= named
    for name, argument in named:
        call = getattr(mpikfac, name)
        assert argument in inspect.signature(call).parameters, (name, argument)
