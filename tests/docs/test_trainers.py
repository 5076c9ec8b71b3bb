"""The programs with trainers on two pages run unchanged, under MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launch import launch

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guide" / "own_script.md"
GROUPS = DOCS / "extensions" / "codistillation.md"
BEFORE = """
import torch
import mpikfac

comm = mpikfac.world()
LOSS = torch.nn.functional.cross_entropy

def fresh():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer = fresh()
torch.manual_seed(comm.rank)
loader = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,)))] * 4
first = LOSS(model(loader[0][0]), loader[0][1]).item()

def part(number):
    torch.manual_seed(number)
    return torch.randn(8, 1, 8, 8), torch.randint(10, (8,))

mine = 8 // comm.size
firsts = [100 * step + comm.rank * mine for step in (1, 2)]
loader_of_parts = [[part(first + number) for number in range(mine)] for first in firsts]
"""
BITS = """
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(kfac.steps, weights.double().sum().item().hex())
"""
STEPS = """
expected, other = fresh()
stepped = mpikfac.KFAC(expected, other, comm, damping=0.03, grafting=mpikfac.NoGrafting())
for images, labels in loader:
    other.zero_grad()
    LOSS(expected(images), labels).backward()
    stepped.step()
torch.testing.assert_close(model.state_dict(), expected.state_dict())
print("as step()")
"""
LEARNT = """
if team.comm is not None:
    assert LOSS(model(loader[0][0]), loader[0][1]).item() < first
print("trains" if team.comm else "decomposes")
"""


CODISTILLED = """
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
assert len(set(comm.allgather(weights.double().sum().item()))) == comm.size
assert codistillation.steps == kfac.steps == 8
assert codistillation.term(images, model(images)).item() > 0
print("learnt")
"""
SERVED = """
if team.comm is None:
    assert len({sum(counts.values()) for counts in staleness}) == 1
    print("served", len(staleness), "clients")
else:
    assert trainer.version == sum(team.comm.allgather(sum(trainer.staleness.values())))
    print("trains")
"""


def program(path: Path, word: str, after: str, page: Path = PAGE) -> str:
    """Return a file with the page's program that contains the word."""
    codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (code,) = (code for code in codes if word in code)
    if after == STEPS:  # Adam's length magnifies rounding where gradients are 0
        code = code.replace("damping=0.03", "damping=0.03, grafting=mpikfac.NoGrafting()")
    path.write_text(BEFORE + code + after)
    return str(path)


@pytest.mark.gate
def test_preconditioning_averaged_gradients_is_a_step(tmp_path):
    """Oracle: `step()` on the same batches."""
    job = launch(2, program(tmp_path / "program.py", "precondition()", STEPS))
    assert job.stdout.splitlines() == ["as step()"] * 2, job.stderr


def test_parts_make_the_same_bits_on_any_number_of_ranks(tmp_path):
    """Oracle: the weights of a single rank."""
    path = program(tmp_path / "program.py", "accumulate()", BITS)
    (one,) = launch(1, path).stdout.splitlines()
    assert one.startswith("2 ")
    assert launch(2, path).stdout.splitlines() == [one] * 2


def test_the_last_rank_decomposes_for_the_others(tmp_path):
    """Oracle: which ranks train, and the training ranks' loss."""
    job = launch(3, program(tmp_path / "program.py", "run_curvature_server(", LEARNT))
    assert sorted(job.stdout.splitlines()) == ["decomposes", "trains", "trains"], job.stderr


def test_the_last_rank_holds_the_weights(tmp_path):
    """Oracle: which ranks train; the clients' loss; updates of two batches."""
    job = launch(3, program(tmp_path / "program.py", "run_parameter_server(", SERVED))
    assert sorted(job.stdout.splitlines()) == ["served 2 clients", "trains", "trains"], job.stderr


def test_groups_learn_from_each_other(tmp_path):
    """Oracle: weights that differ between groups, and a term that is not 0."""
    job = launch(2, program(tmp_path / "program.py", "Codistillation(", CODISTILLED, GROUPS))
    assert job.stdout.splitlines() == ["learnt"] * 2, job.stderr
