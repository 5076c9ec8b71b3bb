"""Direct feedback in the training program: ranks, restarts, and what does not fit."""

from __future__ import annotations

import pytest
import torch

import mpikfac
from mpikfac_apps.training.train import main

pytestmark = pytest.mark.lab

STEPS = 6
QUICK = (
    *(
        "--data.train_images=72",
        "--batch=24",
        "--transport.virtual_ranks=4",
        "--epochs=2",
        "--threads=1",
    ),
    '--direct_feedback=["2","5"]',
)
KINDS = {
    "sgd": ("--optimizer=sgd",),
    "kfac": (
        "--kfac.fisher_type=forward-only",
        "--kfac.inv_update_steps=2",
        "--kfac.factor_update_steps=1",
    ),
}


def runs(root):
    for name, more in KINDS.items():
        options = [*QUICK, *more]
        yield 1, [*options, f"--run_dir={root / f'{name} whole'}"]
        yield 2, [*options, f"--run_dir={root / f'{name} ranks'}"]
        yield 1, [*options, f"--run_dir={root / f'{name} exact'}", "--direct_feedback=[]"]
        yield 2, [*options, f"--run_dir={root / f'{name} again'}", "--max_steps=4"]
        yield 1, [*options, f"--run_dir={root / f'{name} again'}", "--resume=auto"]


def state(run_dir):
    """Return the last checkpoint's weights by name."""
    saved = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:09d}")
    return {name: saved[name] for name in saved if name.startswith("model/")}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ranks_and_restarts_change_no_bit(job, name):
    """Oracle: a run on one rank without a stop; back-propagation ends elsewhere."""
    expected, exact = (state(job / f"{name} {kind}") for kind in ("whole", "exact"))
    for kind in ("ranks", "again"):
        found = state(job / f"{name} {kind}")
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert not torch.equal(exact["model/0.weight"], expected["model/0.weight"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--optimizer=sgd", "--direct_feedback=[conv9]"],
            "must be a module of the model, not 'conv9'",
        ),
        ([], "direct feedback needs Estimator(fisher_type='forward-only')"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path, capfd, options, line):
    """Oracle: the line, and the exit code."""
    with pytest.raises(SystemExit) as end:
        main([*QUICK, *options, f"--run_dir={tmp_path}"])
    assert end.value.code == 2
    assert line in capfd.readouterr().err
