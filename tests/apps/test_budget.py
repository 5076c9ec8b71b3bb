"""Plans before a run follow the budget as the run does after its first batch."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch
from mpi4py import MPI

import mpikfac
from mpikfac.plan import operations
from mpikfac_apps.checking import check
from mpikfac_apps.lab.predict import predictions
from mpikfac_apps.lab.predict.options import SIMULATE
from mpikfac_apps.options.strategy import kfac_settings
from mpikfac_apps.planning import plan
from mpikfac_apps.planning.options import PLAN
from mpikfac_apps.problems import models
from support import inside

CASES = [("autoencoder_small", 64, True), ("lstm_small", 4, True), ("resnet20", 32, False)]


def trained(name: str, batch: int, caplog) -> tuple[str, str]:
    """Return the digest of a run's plan after a step, and what the run says of operations."""
    options = PLAN.read(["--model", name, "--ranks", "1"])
    entry, model = models.network(name), models.build(name)
    settings = kfac_settings(options.kfac, {}, float, entry.covers)
    kfac = mpikfac.KFAC(
        model, torch.optim.SGD(model.parameters(), lr=0.001), MPI.COMM_SELF, **settings
    )
    shape = batch, *entry.image
    inputs = torch.randint(9, shape) if entry.task.inputs == "tokens" else torch.rand(shape)
    with caplog.at_level(logging.INFO, "mpikfac"):
        for _ in range(2):
            model.zero_grad()
            model(inputs).square().mean().backward()
            kfac.step()
    (line,) = (text for text in caplog.messages if "SGD's operations" in text)
    without_means = dataclasses.replace(kfac.plan, means=())  # plans before a run name none
    return without_means.digest(), line


@pytest.mark.gate
@pytest.mark.parametrize(("name", "batch", "cut"), CASES)
def test_the_plan_is_that_of_a_run_after_a_step(name, batch, cut, caplog, capsys):
    """Oracle: digest and line of a run; a plan without a budget, if nothing is cut."""
    asked = ["--model", name, "--ranks", "1", "--batch_per_rank", str(batch)]
    assert plan.main(asked) == 0
    digest, line = trained(name, batch, caplog)
    told = capsys.readouterr().out.splitlines()
    assert f"plan {digest}" in told
    assert line in told
    whole = plan.plan_of(PLAN.read([*asked, "--budget", "null"]))
    assert (whole.digest() != digest) == cut


@pytest.mark.parametrize(
    "asked", [["--ranks", "4"], ["--ranks", "2", "--transport.virtual_ranks", "4"]]
)
def test_ranks_and_parts_foresee_the_joined_batch(asked, capsys):
    """Oracle: layers and line of one rank with the whole batch of 64."""

    def told(arguments: list[str]) -> tuple[list, str]:
        common = ["--model", "autoencoder_small", *arguments]
        assert plan.main(common) == 0
        (line,) = (text for text in capsys.readouterr().out.splitlines() if "SGD's" in text)
        layers = plan.plan_of(PLAN.read(common)).layers
        return [[factor.order for factor in layer.factors] for layer in layers], line

    ranks = int(asked[1])
    assert told([*asked, "--batch_per_rank", str(64 // ranks)]) == told(
        ["--ranks", "1", "--batch_per_rank", "64"]
    )


def test_groups_of_an_attention_count_once():
    """Oracle: a vector for each token; the recorder's numbers."""

    class Attending(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model, x = Attending(), torch.randn(5, 7, 8)
    kfac = mpikfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), MPI.COMM_SELF)
    sizes = mpikfac.layers.call_sizes(model, inside.layers(kfac), x)
    model.zero_grad()
    kfac.clear_statistics()
    model(x).square().mean().backward()
    kfac.step()
    seen = {name: each.vectors for name, each in inside.settings(kfac).budget.seen.items()}
    assert seen == {"attention.in_proj": 5 * 7, "attention.out_proj": 5 * 7}
    assert {name: sum(call.vectors for call in calls) for name, calls in sizes.items()} == seen


def test_own_intervals_and_unknown_images_leave_the_plan(tmp_path, capsys):
    """Oracle: the plan without a budget; no line where nobody knows the image."""
    asked = ["--model", "autoencoder_small", "--ranks", "2"]
    whole = plan.plan_of(PLAN.read([*asked, "--budget", "null"])).digest()
    assert plan.plan_of(PLAN.read([*asked, "--factor_update_steps", "10"])).digest() == whole
    assert plan.plan_of(PLAN.read(asked)).digest() != whole
    file = tmp_path / "own.py"
    file.write_text("from torch import nn\ndef wide(): return nn.Linear(900, 900)\n")
    assert plan.main(["--model", f"{file}:wide", "--ranks", "2"]) == 0
    assert "operations" not in capsys.readouterr().out


@pytest.mark.gate
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_predictions_stretch_the_intervals(batch):
    """Oracle: the least multiple within the budget, counted from the definition."""
    asked = ["--model", "resnet50", "--ranks", "1", "--strategy", "comm-opt"]
    asked += ["--machine", "v100-edr", "--batch_per_rank", str(batch)]
    options = SIMULATE.read(asked)
    machine = mpikfac.predict.load_machine("v100-edr")
    (row,) = predictions.predictions(options, machine)
    network = predictions.network_of(options)
    run = predictions.foreseen_of(options, network, "comm-opt", 1, machine)
    total = mpikfac.plan.Operations()
    whole = mpikfac.make_plan(*network.covered[:1], 1, mpikfac.Strategy())
    for layer, before in zip(run.plan.covered, whole.covered):
        seen = options.kfac.estimator.subsampled(before, 1).seen(network.calls[layer.name], 0.0)
        total += operations(
            layer.shape, layer.preconditioner, seen, options.kfac.grafting.orthogonalize
        )
    allowed = 0.3 * max(2**27, total.passes)
    times = math.ceil((total.statistics / 10 + total.decomposition / 50) / allowed)
    assert (row["factor_update_steps"], row["inv_update_steps"]) == (10 * times, 50 * times)
    grafting = mpikfac.AdamGrafting(momentum=0.9)
    job = mpikfac.predict.Job("resnet50", batch, 10 * times, 50 * times, grafting=grafting)
    assert row["mean"]["seconds"] == mpikfac.predict.simulate(run.plan, machine, job).mean.seconds


def test_the_check_says_the_cost_and_a_remedy(caplog):
    """Oracle: the line of a run with the batch; no remedy where a step costs little."""
    for batch, dear in ((4, True), (4096, False)):
        subject = check.named_subject("autoencoder_small", None, 10)
        text = " ".join(" ".join(check.cost(subject, batch)).split())
        _, line = trained("autoencoder_small", batch, caplog)
        caplog.clear()
        assert line in text
        assert ("To reduce them" in text) == dear
