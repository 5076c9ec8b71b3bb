"""The programs on the pages about curvature and grafting run unchanged, under MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launch import launch

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "ideas" / "curvature.md"
GRAFTING = PAGE.parent / "grafting.md"
TESTS = Path(__file__).parents[1]
BEFORE = f"""
import sys
import torch
import mpikfac

sys.path.append({str(TESTS)!r})
from support import inside

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle = torch.nn.Linear(6, 6), torch.nn.Linear(6, 600)
        self.head = torch.nn.Linear(600, 2)

    def forward(self, x):
        return self.head(self.middle(self.body(x)).mean(1))

comm = mpikfac.world()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
RULE = """
labels = torch.tensor([0, 1, 0, 1])
torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 6)), labels).backward()
kfac.step()
if comm.rank == 0:
    print(*(f"{f.name}:{f.count}x{f.order}" for f in kfac.plan.factors.values()))
"""
OWN = """
model = torch.nn.Sequential(Scaled(6, 2))
x, g = torch.randn(4, 6), torch.randn(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
KFAC
a = torch.cat([x / 6**0.5, torch.ones(4, 1)], 1)
found = kfac.layers[0].second_moment("A", x, g)
torch.testing.assert_close(found, a.T @ a)
print("as the module sees it")
"""
SOLVED = """
x, y = torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
outputs = model(x)
outputs.retain_grad()
torch.nn.functional.cross_entropy(outputs, y).backward()
kfac.step()
a = torch.cat([x, torch.ones(4, 1)], 1).square().mean(0)
g = 4 * outputs.grad.square().sum(0)
gradient = inside.gradients(kfac)["0"]
found, expected = inside.directions(kfac)["0"], gradient / torch.outer(g + 0.03, a + 0.03).sqrt()
torch.testing.assert_close(found / found.norm(), expected / expected.norm())
print("divided by the diagonals")
"""


def code(word):
    """Return the program of the pages that contains the word."""
    text = PAGE.read_text() + GRAFTING.read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (found,) = (code for code in codes if word in code)
    return found


def test_a_rule_says_what_is_kept(tmp_path):
    """Oracle: orders by hand: 600 inputs and a bias as numbers, 600 outputs in halves."""
    (tmp_path / "program.py").write_text(BEFORE + code("def rule") + RULE)
    job = launch(2, str(tmp_path / "program.py"))
    expected = "body.A:1x7 body.G:1x6 middle.A:1x7 middle.G0:1x300 middle.G1:1x300 "
    assert job.stdout.split("\n")[0] == f"{expected}head.A:601x1 head.G:1x2", job.stderr


def test_labels_are_drawn(tmp_path):
    """Oracle: both factors of every layer after a step, for any labels, without a budget."""
    batch = "images, labels = torch.randn(4, 3, 6), torch.tensor([0, 1, 0, 1])\n"
    program = code("or another loss").replace("damping=0.03", "damping=0.03, budget=None")
    (tmp_path / "program.py").write_text(
        f"{BEFORE}{batch}loader = [(images, labels)]\n{program}"
        "weights = inside.weights(kfac).values()\n"
        "print(len(weights), *{round(weight.item(), 6) for weight in weights})\n"
    )
    job = launch(2, str(tmp_path / "program.py"))
    assert job.stdout.splitlines() == ["6 0.4"] * 2, job.stderr


def test_damping_is_adapted(tmp_path):
    """Oracle: damping after five and ten steps of a batch, by hand: a power of 0.95**5 twice."""
    batch = "images, labels = torch.randn(4, 3, 6), torch.tensor([0, 1, 0, 1])\n"
    (tmp_path / "program.py").write_text(
        f"{BEFORE}{batch}loader = [(images, labels)] * 10\n{code('max_norm=1.0')}"
        "import math\n"
        "moves = math.log(damping.damping / 0.03, 0.95**5)\n"
        "print(len({*comm.allgather(damping.damping)}), round(moves, 9) in (-2, 2), kfac.steps)\n"
    )
    job = launch(2, str(tmp_path / "program.py"))
    assert job.stdout.splitlines() == ["1 True 10"] * 2, job.stderr


def test_length_and_momentum_come_from_a_quadratic_model(tmp_path):
    """Oracle: a loss that falls on both ranks; the same weights; a last step in the state."""
    batch = "images, labels = torch.randn(4, 3, 6), torch.tensor([0, 1, 0, 1])\n"
    (tmp_path / "program.py").write_text(
        f"{BEFORE}{batch}loader = [(images, labels)] * 10\n{code('set_batch(images')}"
        "    first = loss.item() if kfac.steps == 1 else first\n"
        "weights = comm.allgather(model.head.weight.tolist())\n"
        "kept = sum('momentum_buffer' in name for name in kfac.state_dict())\n"
        "print(after.item() < first / 10, len({*map(str, weights)}), kept)\n"
    )
    job = launch(2, str(tmp_path / "program.py"))
    assert job.stdout.splitlines() == ["True 1 6"] * 2, job.stderr


@pytest.mark.gate
def test_a_layer_of_ones_own(tmp_path):
    """Oracle: the inputs that the module multiplies by the weight."""
    first, _, last = code("class Scaled(").partition("kfac = ")
    program = BEFORE + first + OWN.replace("KFAC", f"kfac = {last}")
    (tmp_path / "program.py").write_text(program)
    job = launch(2, str(tmp_path / "program.py"))
    assert job.stdout.splitlines() == ["as the module sees it"] * 2, job.stderr


def test_a_preconditioner_of_ones_own(tmp_path):
    """Oracle: the gradient divided by the roots of both damped diagonals, by hand."""
    setup = (
        "model = torch.nn.Sequential(torch.nn.Linear(6, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    own = code("class Diagonal(")
    grafting = "grafting=mpikfac.AdamGrafting(orthogonalize=False)"
    given = f"damping=0.03, preconditioner=Diagonal(), {grafting}"
    made = f"kfac = mpikfac.KFAC(model, optimizer, comm, {given})\n"
    (tmp_path / "program.py").write_text(f"{BEFORE}{setup}{own}{made}{SOLVED}")
    job = launch(2, str(tmp_path / "program.py"))
    assert job.stdout.splitlines() == ["divided by the diagonals"] * 2, job.stderr
