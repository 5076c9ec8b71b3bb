"""`mpikfac influence`: scores of training images from a run's checkpoint."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import h5py
import pytest
import torch
import torch.nn.functional as F
from matplotlib import image

import mpikfac
from mpikfac_apps.lab import finished, memory
from mpikfac_apps.lab.influence import influence, page
from mpikfac_apps.lab.influence.options import INFLUENCE
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.training import train
from mpikfac_apps.training.batches import Normalise
from mpikfac_apps.training.testing.options import EVALUATE
from support.launch import launch

pytestmark = pytest.mark.lab

IMAGES, QUERIES = 120, 3
QUICK = f"--batch=60 --data.train_images={IMAGES} --epochs=2 --threads=1".split()


@pytest.fixture
def run(tmp_path):
    """Return the directory of a K-FAC run."""
    assert train.main([*QUICK, f"--run_dir={tmp_path}/run"]) == 0
    return tmp_path / "run"


def by_hand(run, smoothing=0.0):
    """Return scores and self-influence of the first images, by gradients one by one."""
    data, model = datasets.load("digits"), models.build("digits_cnn", 10, 1)
    covered = mpikfac.layers.cover(model)[0]
    of_layers = {id(p) for layer in covered for p in layer.parameters}
    named = {n: p for n, p in model.named_parameters() if id(p) in of_layers}
    skip = [n for n, _ in model.named_parameters() if n not in named]
    curvature = mpikfac.lab.Curvature.load(run, model, skip=skip)
    model.eval()
    normalise = Normalise(data.train_images[:IMAGES], torch.device("cpu"))

    def gradient(image, label, smoothing=0.0):
        outputs = model(normalise(image[None]))
        loss = F.cross_entropy(outputs, label[None], label_smoothing=smoothing)
        return dict(zip(named, torch.autograd.grad(loss, named.values())))

    some = zip(data.train_images[:4], data.train_labels[:4])
    train_gradients = [gradient(*each, smoothing) for each in some]
    tests = list(zip(data.test_images[:QUERIES], data.test_labels[:QUERIES]))
    damping = mpikfac.Damping(relative=0.1)
    scores = torch.empty(QUERIES, 4)
    for row, each in zip(scores, tests):
        solved = curvature.solve(gradient(*each), damping)
        for column, g in enumerate(train_gradients):
            row[column] = sum((solved[n] * g[n]).sum() for n in named) / IMAGES
    return scores, torch.stack([curvature.quadratic(g, damping) for g in train_gradients])


def test_scores_are_products_of_gradients(run, tmp_path, capsys):
    """Oracle: autograd, image by image, and `Curvature.solve`; without augmentation."""
    out = tmp_path / "scores.h5"
    assert influence.main([f"{run}", f"--queries={QUERIES}", f"--out={out}", "--device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "no factors cover 1.weight, 1.bias" in printed
    assert "largest self-influence, images (label): " in printed
    scores, own = by_hand(run)
    with h5py.File(out) as file:
        found = {name: file[name][()] for name in file}
    assert found["scores"].shape == (QUERIES, IMAGES)
    torch.testing.assert_close(
        torch.from_numpy(found["scores"])[:, :4].float(), scores, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(torch.from_numpy(found["self"])[:4], own, rtol=1e-3, atol=1e-5)
    data = datasets.load("digits")
    assert found["labels"].tolist() == data.train_labels[:IMAGES].tolist()
    assert found["query_labels"].tolist() == data.test_labels[:QUERIES].tolist()
    assert (found["step"], found["damping"]) == (4, 0.1)
    assert found["fisher_type"].decode() == "empirical"
    assert "step 4, empirical Fisher" in printed


def test_scores_are_of_smoothed_labels_and_of_exact_passes(tmp_path, capsys):
    """Oracle: autograd in float32; training images have smoothed labels, and queries plain ones.

    Images are plain ones, too, although the run shifted them.
    """
    out, more = tmp_path / "scores.h5", ["--label_smoothing=0.2", "--ema_decay=0.9"]
    more.append("--data.augment=true")
    run = tmp_path / "run"
    assert train.main([*QUICK, *more, "--autocast=bfloat16", f"--run_dir={run}"]) == 0
    assert influence.main([f"{run}", f"--queries={QUERIES}", f"--out={out}", "--device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "scores are computed at the weights themselves" in printed
    assert "the run used data.augment, but scores are those of the 120 plain images" in printed
    scores, own = by_hand(run, 0.2)
    with h5py.File(out) as file:
        found = torch.from_numpy(file["scores"][()]), torch.from_numpy(file["self"][()])
    torch.testing.assert_close(found[0][:, :4].float(), scores, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[1][:4], own, rtol=1e-3, atol=1e-5)


def test_every_pass_is_progress(run, monkeypatch, capsys):
    """Oracle: 3 passes over 120 images for the queries, and 3 for self-influence, by hand."""
    phases = []
    monkeypatch.setattr(influence.Watchdog, "enter", lambda _, *phase: phases.append(phase))
    monkeypatch.setattr(influence, "PASS", 50)
    monkeypatch.setattr(influence, "NAMES", 2)
    monkeypatch.setattr(finished, "LINES", 2)
    assert influence.main([f"{run}", "--device=cpu"]) == 0
    assert phases.count(("influence", 4)) == 1 + 2 * 3
    printed = capsys.readouterr().out
    assert "no factors cover 1.weight, 1.bias and 2 more: scores ignore" in printed
    assert "\ninfluence: 100 of 120 images of rank 0\n" in printed
    assert "\nself-influence: 100 of 120 images of rank 0\n" in printed


class Pictures(HTMLParser):
    """The pictures of a page by their descriptions, its headings, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.found, self.loaded, self.headings, self._tag = {}, [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self._tag = tag
        if tag == "img":
            kind, _, data = given["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.found[given["alt"]] = image.imread(io.BytesIO(base64.b64decode(data)))
        elif tag in ("script", "link") or "src" in given or "href" in given:
            self.loaded.append((tag, given))

    def handle_data(self, data):
        if self._tag == "h2" and data.strip():
            self.headings.append(data.strip())


def test_a_page_shows_the_images_of_the_largest_scores(run, tmp_path, capsys):
    """Oracle: the images of the data set, pixel by pixel, and the order of the scores."""
    out, report = tmp_path / "scores.h5", tmp_path / "new" / "page.html"
    files = [f"--out={out}", f"--report={report}"]
    more = [f"--queries={QUERIES}", "--top=2", *files, "--device=cpu"]
    assert influence.main([f"{run}", *more]) == 0
    page, data = Pictures(report.read_text()), datasets.load("digits")
    with h5py.File(out) as file:
        scores, own = (torch.from_numpy(file[name][()]) for name in ("scores", "self"))
    sides = [order.topk(2).indices for row in scores for order in (row, -row)]
    shown = torch.cat([*sides, own.topk(60).indices])
    assert page.found.keys() == {
        *(f"training image {i}, label {data.train_labels[i]}" for i in shown),
        *(f"query {i}, label {data.test_labels[i]}" for i in range(QUERIES)),
    }
    for words, pixels in page.found.items():
        images = data.train_images if words.startswith("training") else data.test_images
        expected = images[int(re.search(r"\d+", words)[0]), 0] / data.train_images[:IMAGES].max()
        for channel in range(3):
            found = torch.from_numpy(pixels[..., channel])
            torch.testing.assert_close(found, expected, rtol=0, atol=0.5 / 255 + 1e-6)
    predicted = by_network(run, data.test_images[:QUERIES])
    titles = [f"Query {i}: label {data.test_labels[i]}, predicted {predicted[i]}" for i in range(3)]
    assert page.headings == [*titles, "Largest self-influence"]
    assert page.loaded == []
    text = report.read_text()
    assert f"{sides[0][0]} ({data.train_labels[sides[0][0]]})<br>{scores[0].max():.2e}" in text
    with pytest.raises(SystemExit):
        influence.main([f"{run}", f"--report={report}"])
    assert "page.html exists; use another name or delete it" in capsys.readouterr().err


def by_network(run, images):
    """Return the classes that the run's network predicts."""
    data, model = datasets.load("digits"), models.build("digits_cnn", 10, 1)
    mpikfac.lab.Curvature.load(run, model, skip=[n for n, _ in model.named_parameters()])
    normalise = Normalise(data.train_images[:IMAGES], torch.device("cpu"))
    return model.eval()(normalise(images)).argmax(1).tolist()


def test_what_is_no_image_is_shown_by_number_label_and_score():
    """Oracle: by hand, for inputs of two channels; an autoencoder predicts no class."""
    found = influence.Influence(
        scores=torch.tensor([[0.5, -0.25, 0.125]]),
        own=torch.tensor([1.0, 3.0, 2.0]),
        labels=torch.tensor([7, 8, 9]),
        queries=torch.zeros(1, 2, 4, 4, dtype=torch.uint8),
        query_labels=torch.tensor([6]),
        predicted=None,
    )
    images = torch.ones(3, 2, 4, 4, dtype=torch.uint8)
    text = page.page(found, images, "a <run>", 2)
    cells = re.findall(r"<td>(.*?)</td>", text)
    largest = ["0 (7)<br>5.00e-01", "2 (9)<br>1.25e-01"]
    smallest = ["1 (8)<br>-2.50e-01", "2 (9)<br>1.25e-01"]
    own = ["1 (8)<br>3.00e+00", "2 (9)<br>2.00e+00", "0 (7)<br>1.00e+00"]
    assert cells == [*largest, *smallest, *own]
    assert "<img" not in text and "<p>a &lt;run&gt;; 3 training images.</p>" in text
    assert "<h2>Query 0: label 6</h2>" in text


def test_the_memory_is_planned_and_measured(run, capsys):
    """Oracle: 24 bytes per parameter and query, by hand."""
    assert influence.main([f"{run}", f"--queries={QUERIES}", "--device=cpu"]) == 0
    number = r"([\d.,]+)"
    line = (
        f"memory of a rank, MiB: {number} in use before; planned for influence {number} "
        rf"\(queries {number}, batch {number}\) and self-influence {number} "
        rf"\(eigenbases {number}, batch {number}\); measured {number}"
    )
    found = re.search(line, capsys.readouterr().out)
    model = models.build("digits_cnn", 10, 1)
    layers = mpikfac.layers.cover(model)[0]
    count = sum(p.numel() for layer in layers for p in layer.parameters)
    assert float(found[3]) == pytest.approx(24 * count * QUERIES / 2**20, rel=0.01)


@pytest.mark.gate
def test_the_scores_do_not_depend_on_the_number_of_ranks(run, tmp_path):
    """Oracle: the file of one rank; queries lie on the first rank only."""
    found = []
    for ranks in (1, 3):
        out = tmp_path / f"{ranks}.h5"
        job = launch(
            ranks, "-m", "mpikfac_apps", "influence", str(run), f"--out={out}", "--queries=4"
        )
        assert job.returncode == 0, job.stderr
        with h5py.File(out) as file:
            found.append({name: torch.from_numpy(file[name][()]) for name in ("scores", "self")})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)


def test_a_run_without_a_fisher_matrix_is_refused(tmp_path, capsys):
    """Oracle: one line each, for SGD, and for factors of inputs alone."""
    for more in ("--optimizer=sgd", "--kfac.fisher_type=forward-only"):
        folder = tmp_path / more[-4:]
        assert train.main([*QUICK, more, f"--run_dir={folder}"]) == 0
        with pytest.raises(SystemExit) as left:
            influence.main([f"{folder}", "--device=cpu"])
        assert left.value.code == 2
    errors = capsys.readouterr().err
    assert "belongs to a run with optimizer=sgd; use one with optimizer=kfac" in errors
    assert "fisher_type=forward-only and normalization=expand" in errors


OWN = """
import torch
from mpikfac_apps.problems.datasets import Dataset

def data():
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randint(256, (130, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(130) % 10
    return Dataset(images[:120], labels[:120], images[120:], labels[120:], 10)
"""


def test_other_images_than_those_of_the_run_are_refused(tmp_path, capsys):
    """Oracle: one line, after the pixels of the data set changed."""
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("SEED", "0"))
    assert train.main([*QUICK, f"--data.name={file}:data", f"--run_dir={tmp_path}/run"]) == 0
    file.write_text(OWN.replace("SEED", "1"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        influence.main([f"{tmp_path}/run", "--trust", "--device=cpu"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "the checkpoint belongs to different training images" in error
    assert error.count("\n") == 1


def test_a_run_of_a_language_model_is_refused(tmp_path, capsys):
    """Oracle: one line, before the text is read."""
    (tmp_path / "text.txt").write_text("It is what it is. " * 100)
    text = "--model=lstm_small --data.name=text --data.size=16 --batch=8 --epochs=1 --threads=1"
    of_data = [f"--data.path={tmp_path}/text.txt", "--data.test_images=8", "--data.train_images=16"]
    assert train.main([*text.split(), *of_data, f"--run_dir={tmp_path}/run"]) == 0
    with pytest.raises(SystemExit) as left:
        influence.main([f"{tmp_path}/run", "--device=cpu"])
    assert left.value.code == 2
    assert "model=lstm_small, which learns text; use a run of a network" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_first(run, tmp_path, monkeypatch, capsys):
    """Oracle: a file in the place of the folder; no image is scored."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(influence, "scored", None)
    with pytest.raises(SystemExit) as left:
        influence.main([f"{run}", f"--out={tmp_path}/file/scores.h5"])
    assert left.value.code == 2
    assert f"influence {run}: " in capsys.readouterr().err


def test_too_many_queries_are_refused(run, monkeypatch, capsys):
    """Oracle: one line with the option, on a machine of 2 MB."""
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else 2_000_000)
    with pytest.raises(SystemExit) as left:
        influence.main([f"{run}", "--queries=4", "--device=cpu"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "--queries=4: 4 queries with " in error
    assert "pass at most 1 at a time" in error


@pytest.mark.parametrize("line", [INFLUENCE, EVALUATE])
def test_the_directory_of_the_data_can_be_in_the_home(line, monkeypatch):
    """Oracle: the variable HOME."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert line.read(["RUN", "--data_path=~/data"]).data_path == "/home/someone/data"


def test_memory_that_the_system_does_not_tell_is_unknown(tmp_path, monkeypatch, capsys):
    """Oracle: the line, with a status file of a sandbox."""
    (tmp_path / "status").write_text("Name: python\n")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    report = memory.MemoryReport(mpikfac.comm.world(), torch.device("cpu"))
    report.show({"influence": {"batch": 2**20}})
    out = capsys.readouterr().out
    assert "unknown in use before" in out and out.endswith("measured unknown\n")
