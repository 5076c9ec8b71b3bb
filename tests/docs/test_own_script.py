"""The programs on the page about own scripts run unchanged; frameworks are in tests/frameworks."""

from __future__ import annotations

import pytest

from support import own_script

pytestmark = pytest.mark.slow

PLAIN = """
expected = plain(schedule=falling)
compare(model, expected)
optimizer.zero_grad()
print("plain")
"""
USUAL = """
expected = plain(schedule=falling)
stepped = mpikfac.KFACOptimizer(expected, max_norm=1.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(stepped, 0.01, total_steps=len(loader) // 2)
for batches in zip(*[iter(loader)] * 2):
    stepped.zero_grad()
    for images, labels in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(expected(images), labels) / 2
        loss.backward()
    stepped.step()
    schedule.step()
compare(model, expected)
assert average.n_averaged == len(loader) // 2
print("usual")
"""
SCALED = """
assert scaler.state_dict()["_growth_tracker"] == len(loader)
assert len(set(comm.allgather(model[0].weight.sum().item()))) == 1
print("scaled")
"""
SAVED = """
other = fresh()
resumed = mpikfac.KFACOptimizer(other, max_norm=1.0)
other.load_state_dict(state["model"])
resumed.load_state_dict(state["optimizer"])
for network, stepped in ((model, optimizer), (other, resumed)):
    for images, labels in loader:
        stepped.zero_grad()
        loss_of(network(images), labels).backward()
        stepped.step()
torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
with torch.profiler.profile() as profile:
    loss_of(model(images), labels).backward()
    optimizer.step()
assert any(event.key.startswith("Optimizer.step#") for event in profile.key_averages())
print("saved")
"""
WRAPPED = """
compare(model, plain(epochs=1))
print("equal")
"""


PARTS = [
    ("range(epochs)", PLAIN),
    ("OneCycleLR", USUAL),
    ("torch.save", SAVED),
    ("GradScaler", SCALED),
]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate)])
def test_the_programs_train(tmp_path, monkeypatch, ranks):
    """Oracle: a loop by hand; a run that was not saved; the count of steps of a scaler."""
    monkeypatch.chdir(tmp_path)
    job = own_script.run(tmp_path, ranks, PARTS)
    said = job.stdout.splitlines()
    for part in ("plain", "usual", "saved", "scaled"):
        assert said.count(part) == ranks, job.stderr


def test_gradients_that_ddp_has_averaged_are_averaged_again(tmp_path):
    """Oracle: the loop without DDP."""
    parts = [("DistributedDataParallel", WRAPPED)]
    job = own_script.run(tmp_path, 2, parts)
    assert job.stdout.splitlines() == ["equal"] * 2, job.stderr
