"""The programs on the page about own scripts run unchanged; frameworks are in tests/frameworks."""

from __future__ import annotations

import pytest

from support import own_script

pytestmark = pytest.mark.slow

PLAIN = """
expected = plain()
compare(model, expected)
optimizer.zero_grad()
print("plain")
"""
USUAL = """
inner = expected.optimizer
schedule = torch.optim.lr_scheduler.OneCycleLR(inner, 0.01, total_steps=len(loader) // 2)
for batches in zip(*[iter(loader)] * 2):
    inner.zero_grad()
    for images, labels in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(expected.model(images), labels) / 2
        loss.backward()
    expected.step(max_norm=1.0)
    schedule.step()
compare(model, expected)
assert average.n_averaged == len(loader) // 2
print("usual")
"""
SAVED = """
other = fresh()
resumed = mpikfac.Optimizer(kfac_of(other), max_norm=1.0)
other.load_state_dict(state["model"])
resumed.load_state_dict(state["optimizer"])
for one in (optimizer, resumed):
    for images, labels in loader:
        one.zero_grad()
        loss_of(one.trainer.model(images), labels).backward()
        one.step()
torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
assert resumed.trainer.steps == kfac.steps == 3.5 * len(loader)
print("saved")
"""
PROFILED = """
(step,) = [one for one in profile.key_averages() if one.key == "Optimizer.step#Optimizer.step"]
assert step.count == len(loader)
print("profiled")
"""
WRAPPED = """
compare(model, plain(epochs=1))
print("equal")
"""


PARTS = [
    ("range(2)", PLAIN),
    ("OneCycleLR", USUAL),
    ("torch.save", SAVED),
    ("profile", PROFILED),
]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate)])
def test_loops_are_those_of_the_trainer(tmp_path, monkeypatch, ranks):
    """Oracle: loops with `KFAC.step`; a run that was not saved; the number of steps."""
    monkeypatch.chdir(tmp_path)
    job = own_script.run(tmp_path, ranks, PARTS)
    said = job.stdout.splitlines()
    for part in ("plain", "usual", "saved", "profiled"):
        assert said.count(part) == ranks, job.stderr


def test_gradients_that_ddp_has_averaged_are_averaged_again(tmp_path):
    """Oracle: the loop without DDP."""
    parts = [("DistributedDataParallel", WRAPPED)]
    job = own_script.run(tmp_path, 2, parts, env=own_script.place())
    assert job.stdout.splitlines() == ["equal"] * 2, job.stderr
