"""`mpikfac laplace`: predictions with a posterior from a run's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import pytest
import torch
from torch.optim.swa_utils import update_bn

import mpikfac
from mpikfac_apps.lab.laplace import laplace, measures, posterior
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import train
from mpikfac_apps.training.batches import Normalise
from support.launch import launch

pytestmark = pytest.mark.lab

PAGE = Path(__file__).parents[2] / "docs" / "extensions" / "laplace.md"
IMAGES, TESTED = 60, 12
QUICK = (
    f"--batch=30 --data.train_images={IMAGES} --data.test_images={TESTED} --epochs=2 --threads=1 "
    "--kfac.fisher_type=type-2"
).split()
WHERE = "--device=cpu"


@pytest.fixture
def run(tmp_path):
    """Return the directory of a K-FAC run."""
    assert train.main([*QUICK, f"--run_dir={tmp_path}/run"]) == 0
    return tmp_path / "run"


def read(path):
    """Return the items of a file as tensors and plain values."""
    with h5py.File(path) as file:
        items = {name: file[name][()] for name in file}
    return {n: torch.from_numpy(v) if getattr(v, "ndim", 0) else v for n, v in items.items()}


def by_hand(run, prior, first=1):
    """Return predictions for every second test image, in a dictionary, and the curvature."""
    data, model = datasets.load("digits"), models.build("digits_cnn", 10, 1)
    layers, _ = mpikfac.layers.cover(model)
    skip = sorted(
        {n for n, _ in model.named_parameters()}
        - {f"{x.path}.{p}" for x in layers for p in ("weight", "bias")}
    )
    curvature = mpikfac.lab.Curvature.load(run, model, skip=skip)
    normalise = Normalise(data.train_images[:IMAGES], torch.device("cpu"))
    x = normalise(data.test_images[first:TESTED:2])
    model.eval()
    named = {n: p for n, p in model.named_parameters() if n not in skip}
    rows = []
    for one in x:
        outputs, variances = model(one[None])[0], []
        for output in outputs:
            gradients = torch.autograd.grad(output, named.values(), retain_graph=True)
            g = dict(zip(named, gradients))
            solved = curvature.apply(g, lambda values: 1 / (IMAGES * values + prior))
            variances.append(sum((g[n] * solved[n]).sum() for n in g))
        reduced = outputs / (1 + torch.pi / 8 * torch.stack(variances)).sqrt()
        rows.append(reduced.softmax(0).detach())
    found = {"MAP": model(x).softmax(1).detach(), "linear": torch.stack(rows)}
    own, generator = {n: p.detach().clone() for n, p in named.items()}, torch.Generator()
    generator.manual_seed(0)
    sampled = []
    for _ in range(2):
        drawn = curvature.sample(IMAGES, prior, generator)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(own[name] + drawn[name][0])
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0))
        update_bn([normalise(data.train_images[order])], model)
        sampled.append(model(x).softmax(1).detach())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(own[name])
    return {**found, "samples": torch.stack(sampled).mean(0)}, curvature


def test_predictions_are_those_of_gradients_and_samples(run, tmp_path, capsys):
    """Oracle: autograd for each output, `Curvature.apply` and `sample`, and `update_bn`."""
    out = tmp_path / "laplace.h5"
    more = ["--prior=2", "--samples=2", f"--out={out}", WHERE]
    assert laplace.main([f"{run}", *more]) == 0
    printed = capsys.readouterr().out
    assert "step 4, 60 training images" in printed
    assert "weight_decay=0.0005 of kfac is not a penalty of the loss" in printed
    assert "precision of the prior: 2, given; log-evidence -" in printed
    found, (expected, _) = read(out), by_hand(run, 2.0)
    for name, probabilities in expected.items():
        key = name.lower()
        torch.testing.assert_close(found[key].float(), probabilities, rtol=2e-3, atol=1e-5)
        assert found[f"ood_{key}"].shape == (TESTED // 2, 10)
    data = datasets.load("digits")
    assert found["labels"].tolist() == data.test_labels[1:TESTED:2].tolist()
    assert (found["step"], found["prior"]) == (4, 2.0)
    loss = measures.negative_log_likelihood(found["linear"], found["labels"])
    assert re.search(rf"\n *linear +{loss:.4f} ", printed)


def test_priors_are_chosen_by_evidence_and_by_held_out_images(run, tmp_path, monkeypatch):
    """Oracle: the loss of the other half of the images for each precision, by `by_hand`."""
    grid = [0.01, 1.0, 100.0]
    monkeypatch.setattr(posterior, "GRID", grid)
    arguments, files = ["--samples=0", WHERE], {}
    for prior in ("heldout", "evidence"):
        out = tmp_path / f"{prior}.h5"
        assert laplace.main([f"{run}", f"--prior={prior}", f"--out={out}", *arguments]) == 0
        files[prior] = read(out)
    curvature = by_hand(run, 1.0)[1]
    assert files["evidence"]["prior"] == pytest.approx(
        mpikfac.lab.evidence_prior(curvature, IMAGES)
    )
    assert files["evidence"]["log_evidence"] > files["heldout"]["log_evidence"]
    labels = datasets.load("digits").test_labels[:TESTED:2]
    losses = [
        measures.negative_log_likelihood(by_hand(run, prior, 0)[0]["linear"], labels)
        for prior in grid
    ]
    best = grid[losses.index(min(losses))]
    assert best == files["heldout"]["prior"]


def test_an_evidence_without_maximum(run, monkeypatch, capsys):
    """Oracle: one line with the option; a number is used all the same."""

    def none(*_):
        raise mpikfac.UserError("the evidence has no maximum")

    monkeypatch.setattr("mpikfac.lab.evidence_prior", none)
    with pytest.raises(SystemExit) as left:
        laplace.main([f"{run}", "--prior=evidence", "--samples=0", WHERE])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "--prior=evidence: the evidence has no maximum" in error and error.count("\n") == 1
    assert laplace.main([f"{run}", "--prior=30", "--samples=0", WHERE]) == 0


def test_the_page_shows_the_output(run, capsys):
    """Oracle: the printed lines, except for numbers and paths."""
    assert laplace.main([f"{run}", "--samples=1", WHERE]) == 0
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert forms(shown) == forms(capsys.readouterr().out)


def forms(text):
    """Return the lines of a text without their numbers and paths."""
    lines = [re.sub(r"\S*step-\d+", "PATH", line) for line in text.strip().splitlines()]
    return [" ".join(re.sub(r"-?\d+([.,]\d+)*(e[+-]?\d+)?", "#", line).split()) for line in lines]


def test_progress_and_lacking_tensors(run, monkeypatch, capsys):
    """Oracle: a line after every pass; one line with the tensors that a checkpoint lacks."""
    monkeypatch.setattr("mpikfac_apps.lab.finished.LINES", 1)
    for module in (posterior, laplace):
        monkeypatch.setattr(module, "PASS", 25)
    assert laplace.main([f"{run}", "--measure", "--samples=0", WHERE]) == 0
    printed = capsys.readouterr().out
    assert "curvature: 25 of 60 images of rank 0\ncurvature: 50 of 60" in printed
    assert "evidence: 25 of 60 images of rank 0" in printed
    monkeypatch.setattr("mpikfac_apps.inspecting.weights.load", lambda *_: ["last.weight"])
    with pytest.raises(SystemExit):
        laplace.main([f"{run}", "--measure", "--samples=0", WHERE])
    assert "needs all tensors, but last.weight are missing" in capsys.readouterr().err


def test_the_last_layer_alone(run, capsys):
    """Oracle: the parameters of the last layer, from the network."""
    last = [*models.build("digits_cnn", 10, 1).parameters()][-2:]
    count = sum(parameter.numel() for parameter in last)
    assert laplace.main([f"{run}", "--weights=last", "--measure", "--samples=1", WHERE]) == 0
    assert f"curvature: measured, of {count:,} of " in capsys.readouterr().out


@pytest.mark.gate
def test_predictions_do_not_depend_on_the_number_of_ranks(run, tmp_path):
    """Oracle: the file of one rank."""
    found = []
    for ranks in (1, 3):
        out = tmp_path / f"{ranks}.h5"
        more = ["--measure", "--samples=2", f"--out={out}"]
        job = launch(ranks, "-m", "mpikfac_apps", "laplace", str(run), *more)
        assert job.returncode == 0, job.stderr
        found.append(read(out))
    for name in ("map", "linear", "ood_linear", "samples", "prior", "log_evidence", "labels"):
        torch.testing.assert_close(
            torch.as_tensor(found[1][name]), torch.as_tensor(found[0][name]), rtol=1e-3, atol=1e-5
        )


def test_refusals(run, tmp_path, capsys):
    """Oracle: one line each, with code 2."""
    plain = tmp_path / "plain"
    assert train.main([*QUICK, "--kfac.fisher_type=empirical", f"--run_dir={plain}"]) == 0
    lines = {
        "fisher_type=empirical, whose factors vanish": [f"{plain}"],
        "ood=synthetic must be a data set with images of the run's shape, [1, 8, 8]": [
            *(f"{run}", "--ood=synthetic"),
        ],
        "ood=own.py:f would run own.py; if you trust the file": [f"{run}", "--ood=own.py:f"],
        "prior=-1 must be evidence, heldout, or a number above 0": [f"{run}", "--prior=-1"],
    }
    for line, arguments in lines.items():
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            laplace.main([*arguments, WHERE])
        assert left.value.code == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1


def test_a_run_without_factors_is_measured(tmp_path, capsys):
    """Oracle: SGD's weight decay times the number of images."""
    more = ["--optimizer=sgd", "--weight_decay=0.01", "--label_smoothing=0.1"]
    more += ["--ema_decay=0.9", "--data.augment=true"]
    assert train.main([*QUICK, *more, f"--run_dir={tmp_path}/run"]) == 0
    assert laplace.main([f"{tmp_path}/run", "--measure", "--samples=0", WHERE]) == 0
    printed = capsys.readouterr().out
    assert f"weight_decay=0.01 is a prior of precision {IMAGES * 0.01:g}" in printed
    assert "the run used label_smoothing, data.augment, but the evidence is that of the" in printed
    assert "not on their averages" in printed


# -- measures ------------------------------------------------------------------------------------


def test_measures_of_a_small_table():
    """Oracle: by hand, for three images of two classes."""
    p, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.98, 0.02]]), torch.tensor([0, 0, 1])
    loss = -(torch.tensor([0.9, 0.4, 0.02]).log().mean()).item()
    assert measures.negative_log_likelihood(p, labels) == pytest.approx(loss, rel=1e-6)
    assert measures.accuracy(p, labels) == pytest.approx(1 / 3)
    brier = (2 * 0.1**2 + 2 * 0.6**2 + 2 * 0.98**2) / 3
    assert measures.brier_score(p, labels) == pytest.approx(brier, rel=1e-6)
    # Bins 14, 9 and 15 of 15: each image is alone.
    gaps = (0.1 + 0.6 + 0.98) / 3
    assert measures.calibration_error(p, labels) == pytest.approx(gaps, rel=1e-6)
    both = torch.tensor([[0.95, 0.05], [0.94, 0.06]]), torch.tensor([0, 1])  # in one bin
    assert measures.calibration_error(*both) == pytest.approx(0.945 - 0.5, rel=1e-6)


def test_the_area_counts_pairs():
    """Oracle: all pairs, ties as a half; entropies by torch."""
    torch.manual_seed(0)
    own, other = torch.randn(7, 3).softmax(1), torch.randn(9, 3).softmax(1)
    other[0] = own[0]
    h, k = (torch.distributions.Categorical(p).entropy() for p in (own, other))
    torch.testing.assert_close(measures.entropy(own).float(), h)
    pairs = (k[:, None] > h).double() + (k[:, None] == h).double() / 2
    assert measures.auroc(own, other) == pytest.approx(pairs.mean().item())
