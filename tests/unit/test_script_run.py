"""Public scripts run with another optimizer or rate: `benchmarks/script_run.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rates = []
optimizer.register_step_pre_hook(lambda made, *_: rates.append(made.param_groups[0]["lr"]))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    scheduler.step()
    model.eval()
    print("rate", rates[-1], type(optimizer).__name__, sep="=")
    model.train()
"""
HARNESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from script_run import Training, run
training = Training(*sys.argv[3:5], 4, "rate=(?P<score>.*)=" + sys.argv[5], lambda *_: None)
run(training, Path(sys.argv[2]), Path(sys.argv[2]).parent, [], 0)
print(json.dumps([training.steps, [test["score"] for test in training.tests]]))
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    ("optimizer", "setting", "kind", "rates"),
    [
        ("own", "rate=0.1", "SGD", [0.05, 0.025, 0.0125, 0.00625]),  # the script's schedule
        ("own", "rate=0.1 falling", "SGD", [0.05, 0.0375, 0.025, 0.0125]),
        ("kfac", "falling", "KFACOptimizer", [0.0075, 0.005625, 0.00375, 0.001875]),
    ],
)
def test_a_script_gets_optimizer_and_rates(optimizer, setting, kind, rates, tmp_path):
    """Oracle: the schedules by hand; the kind of the script's own object."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(BENCHMARKS), str(script), optimizer, setting, kind]
    command = [sys.executable, "-c", HARNESS, *arguments]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    steps, scores = json.loads(shown)
    assert (steps, scores) == (4, pytest.approx(rates))
