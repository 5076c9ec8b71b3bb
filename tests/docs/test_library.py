"""The programs on the page about the library run unchanged, under MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.launch import launch

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "library.md"
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
stepped = mpikfac.KFAC(expected, other, comm, damping=0.03, length=mpikfac.Length("own"))
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


SCALED = """
assert LOSS(model(loader[0][0]), loader[0][1]).item() < first
assert kfac.steps == 4 and scaler.state_dict()["_growth_tracker"] == 4
print("trains")
"""


SAME = """
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
assert len(set(comm.allgather(weights.double().sum().item()))) == 1
assert LOSS(model(loader[0][0]), loader[0][1]).item() < first
"""
DECAYED = """
assert abs(optimizer.param_groups[0]["lr"]) < 1e-9
print("decayed")
"""
THAWED = """
start = fresh()[0]
assert not torch.equal(start[0].weight, model[0].weight) and kfac.steps == 8
print("thawed")
"""
AVERAGED = """
assert average.n_averaged == 4
start, end = fresh()[0][3].weight, model[3].weight
inside = (average.module[3].weight - end).norm() / (start - end).norm()
assert 0 < inside < 1
print("averaged")
"""
CODISTILLED = """
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
assert len(set(comm.allgather(weights.double().sum().item()))) == comm.size
assert codistillation.steps == kfac.steps == 8
assert codistillation.term(images, model(images)).item() > 0
print("learnt")
"""
SAVED = """
held = torch.load("model.pt", weights_only=True) if comm.rank == 0 else model.state_dict()
torch.testing.assert_close(held, model.state_dict(), rtol=0, atol=0)
other, of_other = fresh()
again = mpikfac.KFAC(other, of_other, comm, damping=0.03)
again.load_state_dict(torch.load(f"state-{comm.rank}.pt", weights_only=True))
for trainer in (kfac, again):
    trainer.optimizer.zero_grad()
    LOSS(trainer.model(loader[0][0]), loader[0][1]).backward()
    trainer.step()
torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
print("saved")
"""


SERVED = """
if team.comm is None:
    assert len({sum(counts.values()) for counts in staleness}) == 1
    print("served", len(staleness), "clients")
else:
    assert trainer.version == sum(team.comm.allgather(sum(trainer.staleness.values())))
    print("trains")
"""


def program(path: Path, word: str, after: str) -> str:
    """Return a file with the page's program that contains the word."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (code for code in codes if word in code)
    if after == STEPS:  # Adam's length magnifies rounding where gradients are 0
        code = code.replace("damping=0.03", 'damping=0.03, length=mpikfac.Length("own")')
    path.write_text(BEFORE + code + after)
    return str(path)


@pytest.mark.gate
def test_preconditioning_averaged_gradients_is_a_step(tmp_path):
    """Oracle: `step()` on the same batches."""
    job = launch(2, program(tmp_path / "program.py", "precondition()", STEPS))
    assert job.stdout.splitlines() == ["as step()"] * 2, job.stderr


def test_parts_make_the_same_bits_on_any_number_of_ranks(tmp_path):
    """Oracle: the weights of a single rank."""
    path = program(tmp_path / "program.py", "collect()", BITS)
    (one,) = launch(1, path).stdout.splitlines()
    assert one.startswith("2 ")
    assert launch(2, path).stdout.splitlines() == [one] * 2


def test_scaled_losses_train(tmp_path):
    """Oracle: the loss before; no step was skipped."""
    job = launch(2, program(tmp_path / "program.py", "GradScaler", SCALED))
    assert job.stdout.splitlines() == ["trains"] * 2, job.stderr


def test_the_last_rank_decomposes_for_the_others(tmp_path):
    """Oracle: which ranks train, and the training ranks' loss."""
    job = launch(3, program(tmp_path / "program.py", "serve(", LEARNT))
    assert sorted(job.stdout.splitlines()) == ["decomposes", "trains", "trains"], job.stderr


def test_the_last_rank_holds_the_weights(tmp_path):
    """Oracle: which ranks train; the clients' loss; updates of two batches."""
    job = launch(3, program(tmp_path / "program.py", "serve_updates(", SERVED))
    assert sorted(job.stdout.splitlines()) == ["served 2 clients", "trains", "trains"], job.stderr


@pytest.mark.parametrize(
    ("word", "after", "said"),
    [
        ("CosineAnnealingLR", SAME + DECAYED, "decayed"),
        ("chunk(4)", STEPS, "as step()"),
        ("requires_grad_(epoch", SAME + THAWED, "thawed"),
        ("AveragedModel", SAME + AVERAGED, "averaged"),
        ("torch.save(kfac", SAME + SAVED, "saved"),
        ("Codistillation(", CODISTILLED, "learnt"),
    ],
)
def test_loops_of_training_work_as_the_page_says(tmp_path, monkeypatch, word, after, said):
    """Oracles: equal weights and a lower loss; `step()` on the joined batch; bits; other groups."""
    monkeypatch.chdir(tmp_path)
    job = launch(2, program(tmp_path / "program.py", word, after))
    assert job.stdout.splitlines() == [said] * 2, job.stderr
