"""The programs of docs/guide/own_script.md, preceded by data and followed by oracles."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from support.launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own_script.md"
STEPS = 20  # steps per epoch
BEFORE = f"""
import torch
import mpikfac

torch.set_default_dtype(torch.float64)  # so that averages of averages differ by little
loss_of = torch.nn.functional.cross_entropy

def fresh():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Tanh(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))

def compare(model, expected):
    # A single process computes the same numbers; DDP and the order of examples only round.
    tolerance = {{"rtol": 0, "atol": 0}} if comm.size == 1 else {{"rtol": 1e-7, "atol": 1e-9}}
    weights = expected.state_dict()
    torch.testing.assert_close(model.state_dict(), weights, **tolerance)
    assert not torch.equal(weights["0.weight"], fresh()[0].weight)

model, comm = fresh(), mpikfac.world()
dataset = torch.utils.data.TensorDataset(
    torch.randn({8 * STEPS} * comm.size, 1, 6, 6), torch.randint(10, ({8 * STEPS} * comm.size,))
)
"""
LOOP = """
def falling(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 2 * len(loader))

def plain(epochs=2, schedule=None, **settings):
    model = fresh()
    optimizer = mpikfac.KFACOptimizer(model, **settings)
    scheduler = schedule(optimizer) if schedule else None
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    return model
"""


def blocks() -> list[str]:
    """Return the page's programs, in order."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(
    folder: Path, ranks: int, parts: Sequence[tuple[str, str]], **choices
) -> CompletedProcess[str]:
    """Run a job with the page's first two programs and `parts`; return its result.

    Args:
        parts: programs of the page, by a word in each, and the oracle to run after each.
        choices: see `launch`; `changed` are texts to replace in the page's programs.
    """
    changed = choices.pop("changed", {})
    code = "\n".join([*blocks()[:2], LOOP])
    for word, after in parts:
        code += next(block for block in blocks()[2:] if word in block) + after
    for old, new in changed.items():
        assert old in code
        code = code.replace(old, new)
    program = folder / "program.py"
    program.write_text(BEFORE + code)
    return launch(ranks, str(program), **choices)


def place() -> dict[str, str]:
    """Return the variables through which Accelerate's processes meet, as the page names them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
