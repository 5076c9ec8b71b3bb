"""Runs whose ranks share out the channels of layers."""

from __future__ import annotations

import json

import pytest
import torch

import mpikfac
from mpikfac_apps.options.parse import parse
from support.launch import run_each

# an epoch has three steps
QUICK = (
    *("--data.train_images=360", "--batch=120", "--epochs=2", "--threads=1", "--log_every=1"),
    *("--eval_every=2", "--ema_decay=0.5"),
)
SGD = ("--optimizer=sgd", "--lr=0.05")
KFAC = ("--lr=0.003",)  # a larger rate enlarges differences of rounding
SHORT = ("--max_steps=3",)
NAMED = '--split_layers=["3=outputs","8=inputs"]'
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]


def weights(run_dir):
    """Return the weights in the last checkpoint of a run."""
    found = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / "step-000000006")
    return {name: found[name] for name in found if name.startswith("model/")}


def losses(run_dir):
    """Return all losses in the metrics of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [value for row in rows for key, value in row.items() if key.endswith("loss")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a directory of finished runs."""
    root = tmp_path_factory.mktemp("split")
    asked = {
        "sgd": (2, SGD),
        "sgd, named": (2, (*SGD, NAMED)),
        "kfac": (2, KFAC),
        "kfac, named": (2, (*KFAC, NAMED, "--trace_steps=3")),
        "auto": (2, ("--split_layers=auto", "--model=autoencoder_small", "--batch=8", *SHORT)),
        "kfac on 4": (4, KFAC),
        "kfac, groups": (4, (*KFAC, '--split_layers=["8=outputs"]', "--tp_size=2", *SHORT)),
    }
    jobs = [(n, [*QUICK, f"--run_dir={root / name}", *more]) for name, (n, more) in asked.items()]
    whole = ("--split_layers=[]", "--tp_size=null", "--resume=auto")
    resumed = (4, [*QUICK, *KFAC, f"--run_dir={root / 'kfac, groups'}", *whole])
    run_each([*jobs, resumed], root)
    return root


@pytest.mark.parametrize(
    ("plain", "split"),
    [("sgd", "sgd, named"), ("kfac", "kfac, named"), ("kfac on 4", "kfac, groups")],
)
def test_split_layers_change_no_number(runs, plain, split):
    """Oracle: the data parallel run, to rounding; one run is resumed without split layers."""
    expected, found = weights(runs / plain), weights(runs / split)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5)
    assert losses(runs / split) == pytest.approx(losses(runs / plain), rel=1e-3)


def test_the_log_tells_who_shares_out_the_layers(runs):
    """Oracle: the options; of a layer of 64 x 256 weights, 4 x 256 outputs are fewer bytes."""
    named, chosen = ((runs / name / "log.txt").read_text() for name in ("kfac, named", "auto"))
    assert "2 ranks in groups of 2 neighbouring ranks" in named
    first = next(line.split() for line in chosen.splitlines() if " examples " in line)
    assert first[1:4] == ["1", "2", "outputs"]
    assert "exchange activations" in (runs / "kfac, named" / "stages.json").read_text()


WRONG = {
    "no channels": (["--split_layers=[fc]"], "split_layers=fc must be NAME=outputs, NAME=inputs"),
    "auto and a name": (['--split_layers=["auto","fc=inputs"]'], "split_layers=auto must be"),
    "tp_size alone": (
        ["--tp_size=2"],
        r"tp_size=2 needs names of layers in split_layers, not \[\]",
    ),
    "tp_size of auto": (["--tp_size=2", "--split_layers=auto"], "tp_size=2 needs names of layers"),
    "groups": ([NAMED, "--tp_size=3"], "tp_size=3 must divide the 4 ranks"),
    "fewer ranks": ([NAMED, "--shrink"], r"shrink=true needs split_layers=\[\]"),
    "copies": ([NAMED, *SGD, "--strategy=local-sgd"], "needs exchanged=gradients, not weights"),
}


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_split_is_refused(given, said):
    """Oracle: the number of ranks, and the table of combinations."""
    with pytest.raises(ValueError, match=said):
        parse(given, 4)
