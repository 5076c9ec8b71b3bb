"""Language models in the training program: text, loss and measure, ranks, comparisons."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpikfac_apps.checking import check
from mpikfac_apps.lab.study import compare, spec
from mpikfac_apps.options.parse import parse
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.problems.language import corpus
from mpikfac_apps.problems.tasks import LANGUAGE
from mpikfac_apps.training import train
from mpikfac_apps.training.parts.optimizers import hidden_matrices
from support.launch import TRAIN, run_each

pytestmark = pytest.mark.gate

NETWORKS = ("gpt_small", "lstm_small")
CONFIG = Path(__file__).parents[2] / "jobs" / "configs" / "text_kfac.yaml"
TEXT = "\n".join(f"{n} times {n} is {n * n};" for n in range(900))
SHORT = ("--batch=24", "--data.train_images=120", "--data.test_images=8", "--epochs=2")
KFAC = ("--kfac.factor_update_steps=2", "--kfac.inv_update_steps=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a text in two files, and files that are no text."""
    root = tmp_path_factory.mktemp("text")
    (root / "b").mkdir()
    (root / "b" / "late.txt").write_text(TEXT[9000:])
    (root / "b" / "late.md").write_text("no text")
    (root / "a.py").write_text(TEXT[:9000])
    return root


def rows(run_dir):
    """Return the lines of metrics."""
    return list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))


def arguments(run_dir, folder, *more):
    data = (f"--data.path={folder}", "--data.name=text", "--data.size=8", "--log_every=2")
    return [*data, *SHORT, "--threads=1", f"--run_dir={run_dir}", *more]


# -- data ----------------------------------------------------------------------------------------


def test_a_text_is_cut_into_windows_without_loss(folder):
    """Oracle: the text itself; the last tenth is for test; labels are the text one byte later."""
    found = datasets.load("text", str(folder), size=8)
    end = len(TEXT) - len(TEXT) // 10
    for part, images, labels in (
        (TEXT[:end], found.train_images, found.train_labels),
        (TEXT[end:], found.test_images, found.test_labels),
    ):
        assert images.shape == labels.shape == ((len(part) - 1) // 8, 8)
        used = images.numel()
        assert bytes(images.flatten().tolist()).decode() == part[:used]
        assert bytes(labels.flatten().tolist()).decode() == part[1 : used + 1]
    assert found.classes == 256 and f"2 files, {len(TEXT):,} bytes" in found.about


def test_the_usual_text_is_the_standard_library():
    """Oracle: a file of the library; nothing of installed packages and of tests."""
    found = corpus.read()
    text = bytes(found.tokens.numpy())
    assert f"Python {platform.python_version()}" in found.about
    assert Path(json.__file__).read_bytes() in text
    assert Path(torch.__file__).read_bytes() not in text
    root = Path(json.__file__).parents[1]
    chosen = corpus.files_below(root, corpus.LEFT_OUT)
    assert chosen == sorted(chosen) and not any(corpus.LEFT_OUT & {*path.parts} for path in chosen)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model=gpt_small", "learns text, which data.name=digits lacks; try model=digits_cnn"),
        ("--model=resnet20 --data.name=text", "labels, which data.name=text lacks; try model=gpt"),
        ("--model=autoencoder --data.name=text", "learns pixels, which data.name=text lacks"),
        ("--model=gpt_small --data.name=text --data.augment", "data.augment=true needs images"),
        ("--model=gpt_small --data.name=text --label_smoothing=0.1", "needs a classifier"),
    ],
)
def test_options_that_do_not_fit_a_text_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        parse(options.split(), 1)


def test_a_folder_without_enough_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no text; pass a file, or a folder of"):
        datasets.load("text", str(tmp_path))
    (tmp_path / "short.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match="data.size=64: 10 bytes of text do not fill a window"):
        datasets.load("text", str(tmp_path / "short.txt"))


# -- task and networks ---------------------------------------------------------------------------


def test_loss_and_bits_are_sums_of_logarithms():
    """Oracle: the probability of each next token, position by position."""
    scores = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    following = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]], dtype=torch.uint8)
    targets = LANGUAGE.targets(torch.zeros(2, 4), following)
    logs = [
        math.log(math.exp(scores[n, token, place]) / sum(map(math.exp, scores[n, :, place])))
        for n, window in enumerate(following.tolist())
        for place, token in enumerate(window)
    ]
    assert LANGUAGE.loss(scores, targets).item() == pytest.approx(-sum(logs) / 8, rel=1e-5)
    bits = LANGUAGE.measured(scores, targets).item()
    assert bits == pytest.approx(-sum(logs) / 4 / math.log(2), rel=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_later_token_changes_no_earlier_output(name):
    """Oracle: the outputs for two windows that differ from the sixth token on."""
    torch.manual_seed(0)
    model = models.build(name, classes=20, channels=9)
    one = torch.randint(20, (3, 9))
    other = one.clone()
    other[:, 5] = (one[:, 5] + 1) % 20
    scores, changed = model(one), model(other)
    assert scores.shape == (3, 20, 9)
    torch.testing.assert_close(scores[..., :5], changed[..., :5], rtol=0, atol=1e-6)
    assert ((scores - changed)[..., 5:].abs().amax((0, 1)) > 1e-5).all()
    shorter = model(one[:, :4])  # a shorter window, as of an own text
    torch.testing.assert_close(shorter, scores[..., :4], rtol=0, atol=1e-6)


def test_kfac_covers_all_but_norms_and_positions():
    """Oracle: the names of the modules; Muon leaves embedding and last layer to AdamW."""
    layers, others = models.shapes_of("gpt_small")
    names = {layer.name for layer in layers}
    model = models.build("gpt_small", 256, 64)
    inside = {"attention.project", "attention.out", "mlp1", "mlp2"}
    hidden = {f"blocks.{n}.{name}" for n in range(4) for name in inside}
    assert names == {"embedding", "head", *hidden}
    rest = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in others}
    assert rest <= {"", "norm", "norm1", "norm2"}
    weights = set(hidden_matrices(model))
    found = {name for name, weight in model.named_parameters() if weight in weights}
    assert found == {f"{name}.weight" for name in hidden}
    cells = {layer.name for layer in models.shapes_of("lstm_small")[0]}
    assert cells == {"embedding", "cell.ih", "cell.hh", "head"}


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_and_gradients_are_right(name, capsys):
    """Oracle: the check, with autograd and dense solves."""
    assert check.main([name, "--input=5", "--classes=11", "--batch=2"]) == 0
    assert "All right" in capsys.readouterr().out


# -- the program ---------------------------------------------------------------------------------


def test_curvature_knows_the_positions_of_the_loss():
    """Oracle: the size of a window; images have a single label."""
    text = parse(["--model=gpt_small", "--data.name=text", "--data.size=16"], 1)
    assert text.kfac.estimator.num_per_example_loss_terms == 16
    assert parse([], 1).kfac.estimator.num_per_example_loss_terms == 1


def test_a_study_plans_the_network_of_the_run():
    """Oracle: the factors of a network with all bytes."""
    options = parse(["--model=gpt_small", "--data.name=text", "--data.size=16"], 1)
    expected = {
        factor.order for layer in models.shapes_of("gpt_small")[0] for factor in layer.factors
    }
    assert {factor.order for factor in spec.plan_of(options, 2).factors.values()} == expected


@pytest.fixture(scope="module")
def job(tmp_path_factory, folder):
    """Return the directory of the same runs on 1 and 2 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    run_each(
        [
            (ranks, arguments(root / f"{name} {ranks}", folder, f"--model={name}", *KFAC))
            for name in NETWORKS
            for ranks in (1, 2)
        ],
        root,
    )
    return root


@pytest.mark.gate
@pytest.mark.parametrize("name", NETWORKS)
def test_two_ranks_learn_what_one_rank_learns(job, name):
    """Oracle: one rank."""
    one, two = (rows(job / f"{name} {ranks}") for ranks in (1, 2))
    assert one[0]["loss"] == pytest.approx(math.log(256), rel=0.2)
    for key in ("loss", "train_bits_per_byte", "test_bits_per_byte"):
        pair = [[row[key] for row in lines if key in row] for lines in (one, two)]
        assert pair[0] == pytest.approx(pair[1], rel=2e-4), key
    assert pair[0][-1] < pair[0][0] < 8


def test_the_measure_is_of_the_test_text(job):
    """Oracle: bits are the loss of the test over log 2."""
    last = rows(job / "gpt_small 1")[-1]
    assert last["test_bits_per_byte"] == pytest.approx(last["test_loss"] / math.log(2), rel=1e-5)


def test_a_resumed_run_goes_on_exactly(tmp_path, folder, job):
    """Oracle: the uninterrupted run."""
    given = arguments(tmp_path, folder, "--model=gpt_small", *KFAC)
    assert train.main([*given, "--max_steps=3"]) == 0
    assert train.main([*given, "--resume=auto"]) == 0
    times = ("seconds", "images_per_second", "communication")
    whole, parts = (
        [{key: value for key, value in row.items() if key not in times} for row in rows(root)]
        for root in (job / "gpt_small 1", tmp_path)
    )
    assert parts == whole


@pytest.mark.parametrize("preconditioner", ["shampoo", "soap", "muon"])
def test_preconditioners_of_the_gradient_learn_a_text(tmp_path, folder, preconditioner):
    """Oracle: the loss falls; positions of a loss matter only where statistics are recorded."""
    chosen = (f"--kfac.preconditioner={preconditioner}", "--kfac.skip=[embedding]", "--max_steps=6")
    assert train.main(arguments(tmp_path, folder, "--model=gpt_small", *chosen)) == 0
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0]


def test_compare_knows_that_few_bits_are_good(job, capsys):
    """Oracle: the lines of the metrics."""
    runs = {f"{name} 1": job / f"{name} 1" for name in NETWORKS}
    finals = {name: rows(run)[-1]["test_bits_per_byte"] for name, run in runs.items()}
    target = min(finals.values()) + 1e-6
    assert compare.main([*map(str, runs.values()), "--target", str(target)]) == 0
    (best,) = [name for name, final in finals.items() if final < target]
    told = f"A test bits per byte of {target:.4g} was reached by {best} after 2 epochs"
    assert told in capsys.readouterr().out


def test_the_file_of_options_has_a_language_model():
    """Oracle: the printed options."""
    command = [sys.executable, *TRAIN, f"--config={CONFIG}", "--optimizer=adamw", "--print_config"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"optimizer: adamw", "model: gpt_small", "  name: text"} <= set(shown.splitlines())
