"""Volumes in the training program: crops, Dice coefficients, K-FAC in three dimensions, ranks."""

from __future__ import annotations

import importlib.util
import json
import math

import numpy as np
import pytest
import torch

from mpikfac_apps.checking import check
from mpikfac_apps.lab.study.measures import MEASURES
from mpikfac_apps.options.conflicts import doubt
from mpikfac_apps.options.parse import parse
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.problems.tasks import SEGMENTATION
from mpikfac_apps.problems.volumes import crops
from mpikfac_apps.problems.volumes.networks import ResidualBlock3d
from mpikfac_apps.training import train
from mpikfac_apps.training.batches import Normalise
from mpikfac_apps.training.testing import evaluate
from support.launch import run_each

pytestmark = pytest.mark.lab

nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed; run pip install nibabel")
SIDE, SIZE = 32, 8
VOLUME = ("--model=segmenter3d", "--data.name=volume")
RUN = ("--batch=8", "--data.train_images=24", "--data.test_images=9", "--epochs=2", "--log_every=1")
KFAC = ("--kfac.factor_update_steps=2", "--kfac.inv_update_steps=2")


def written(folder, image, labels):
    """Write a folder of a volume."""
    for name, values in (("image", image), ("labels", labels)):
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{name}.nii.gz")
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with balls within a ball: two classes, of different brightness, and noise."""
    place = np.indices((SIDE,) * 3) - (SIDE - 1) / 2
    radius = np.sqrt((place**2).sum(0))
    labels = np.where(radius < 9, 2, np.where(radius < 15, 1, 0)).astype(np.uint8)
    noise = np.random.default_rng(0).normal(0, 20, labels.shape)
    image = (100 * labels + noise).astype(np.float32)
    return written(tmp_path_factory.mktemp("volume"), image, labels)


def rows(run_dir):
    """Return the lines of metrics, without times."""
    times = ("seconds", "images_per_second", "communication")
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


def arguments(run_dir, folder, *more):
    data = (*VOLUME, f"--data.path={folder}", f"--data.size={SIZE}")
    return [*data, *RUN, *KFAC, "--threads=1", f"--run_dir={run_dir}", *more]


# -- data ----------------------------------------------------------------------------------------


def test_crops_are_a_grid_of_each_half(tmp_path):
    """Oracle: slices by hand, of a volume whose voxels all have another number.

    A crop without a class above 0, and what fills no crop, are left out.
    """
    sides = 6, 9, 5  # halves of 5 and 4 along the second side
    numbers = np.arange(math.prod(sides)).reshape(sides) % 251
    labels = np.zeros(sides, np.uint8)
    labels[1, 1, 1] = labels[5, 3, 3] = labels[2, 8, 2] = 1
    image = numbers.astype(np.uint8)
    brightest = np.percentile(image, 99.9)
    bytes_of = np.rint(255 * np.clip(image / brightest, 0, 1)).astype(np.uint8)
    found = datasets.load("volume", written(tmp_path, image, labels), size=2)
    places = [(slice(0, 2), slice(0, 2), slice(0, 2)), (slice(4, 6), slice(2, 4), slice(2, 4))]
    for place, crop, classes in zip(places, found.train_images, found.train_labels, strict=True):
        assert np.array_equal(crop[0], bytes_of[place])
        assert np.array_equal(classes, labels[place])
    place = slice(2, 4), slice(7, 9), slice(2, 4)
    assert np.array_equal(found.test_images[0, 0], bytes_of[place]) and len(found.test_images) == 1
    assert found.classes == 2 and "6x9x5 voxels" in found.about


def test_the_template_has_grey_and_white_matter():
    """Oracle: the files of nilearn, read here; halves share no voxel."""
    if importlib.util.find_spec("nilearn") is None:
        pytest.skip("nilearn is not installed; run pip install --no-deps nilearn")
    volume = crops.read()
    assert volume.voxels.shape == volume.classes.shape == (197, 233, 189)
    brightness = [volume.voxels[volume.classes == kind].mean() for kind in range(3)]
    assert brightness[0] < brightness[1] < brightness[2]  # T1: white matter is brightest
    back, front = volume.halves()
    joined = np.concatenate([back.voxels, front.voxels], 1)
    assert np.array_equal(joined, volume.voxels) and "MNI152" in volume.about


def test_volumes_are_normalised_by_channel():
    """Oracle: mean and deviation in numpy."""
    images = torch.randint(256, (3, 2, 4, 4, 4), dtype=torch.uint8)
    pixels = images.double().numpy().transpose(1, 0, 2, 3, 4).reshape(2, -1)
    mean, deviation = (f(pixels, 1).reshape(1, 2, 1, 1, 1) for f in (np.mean, np.std))
    found = Normalise(images, torch.device("cpu"))(images)
    np.testing.assert_allclose(found, (images.numpy() - mean) / deviation, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "labels", "told"),
    [
        (None, None, "image.nii.gz raised FileNotFoundError"),
        (b"no volume", b"", "image.nii.gz raised "),
        (np.zeros((4, 4)), np.zeros((4, 4)), r"\[4, 4\] must have three sides and <= "),
        (np.ones((8, 8, 8)), np.ones((8, 8, 9)), r"shape of image.nii.gz, \[8, 8, 8\], not"),
        (np.ones((8, 8, 8)), 1.5 * np.ones((8, 8, 8)), "whole numbers from 0 to 255"),
        (np.ones((8, 8, 8)), -np.ones((8, 8, 8)), "whole numbers from 0 to 255"),
        (
            np.ones((8, 8, 8)),
            np.zeros((8, 8, 8)),
            r"data.size=4: a half of the volume \(8x4x8 voxels\) contains no",
        ),
        (np.ones((8, 6, 8)), np.ones((8, 6, 8)), "use a smaller size"),
    ],
)
def test_files_that_are_no_volume_are_refused(image, labels, told, tmp_path):
    """Oracle: the line."""
    if isinstance(image, bytes):
        (tmp_path / "image.nii.gz").write_bytes(image)
    elif image is not None:
        written(tmp_path, image.astype(np.float32), labels.astype(np.float32))
    with pytest.raises(ValueError, match=told) as refusal:
        datasets.load("volume", str(tmp_path), size=4)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("package", ["nibabel", "nilearn"])
def test_a_missing_package_is_named(package, monkeypatch):
    """Oracle: the line."""
    hidden = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else hidden(name)
    )
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    if package == "nibabel":
        with pytest.raises(ValueError, match="needs the package nibabel.+run pip install nibabel"):
            crops.read("anywhere")
    else:
        with pytest.raises(ValueError, match="data.path=null needs the package nilearn"):
            crops.read()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--model=segmenter3d", "learns voxels, which data.name=digits lacks; try model=digits"),
        ("--model=resnet20 --data.name=volume", "lacks; try model=segmenter3d"),
        (f"{' '.join(VOLUME)} --data.augment", "data.augment=true needs images, not data.name=vol"),
        (f"{' '.join(VOLUME)} --label_smoothing=0.1", "needs a classifier"),
        (f"{' '.join(VOLUME)} --data.mixup=0.2", "needs a classifier"),
        (f"{' '.join(VOLUME)} --data.classes=3", "data.classes=3 needs data.name=synthetic"),
    ],
)
def test_options_that_do_not_fit_a_volume_are_refused(options, told):
    """Oracle: the line."""
    with pytest.raises(ValueError, match=told):
        parse(options.split(), 1)


def test_small_crops_are_told_of():
    """Oracle: the line."""
    options = parse([*VOLUME, "--data.size=4"], 1)
    assert "made for images of 16x16x16 pixels, but those of data.name=volume" in doubt(options)


# -- measures and network ------------------------------------------------------------------------


def test_dice_and_voxel_accuracy():
    """Oracle: sets of voxels in numpy; class 2 lacks in the truth, class 3 everywhere."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 3, 4, 3, generator=generator)
    scores[:, 3] = -9.0
    classes = torch.randint(2, (3, 3, 4, 3), generator=generator, dtype=torch.uint8)
    targets = SEGMENTATION.targets(torch.zeros(3), classes)
    best, right = scores.argmax(1).numpy(), classes.numpy()
    a, b = best == 1, right == 1
    expected = [2 * (a & b).sum() / (a.sum() + b.sum()), 0.0]
    overlaps, accuracy = SEGMENTATION.tests(4).values()
    parts = [overlaps(scores[part], targets[part]) for part in (slice(0, 1), slice(1, 3))]
    means = (sum(parts) / 3).tolist()  # of any batches
    assert len(means) == SEGMENTATION.numbers(4) == 8
    assert SEGMENTATION.value(means) == pytest.approx(np.mean(expected), rel=1e-6)
    found = accuracy(scores, targets).item()
    assert found == pytest.approx(sum((best[i] == right[i]).mean() for i in range(3)), rel=1e-6)
    perfect = torch.nn.functional.one_hot(targets, 4).movedim(-1, 1).float()
    assert SEGMENTATION.value(overlaps(perfect, targets).tolist()) == 1.0
    nothing = torch.zeros_like(targets)
    assert math.isnan(SEGMENTATION.value(overlaps(-perfect * 0, nothing).tolist()))


def test_a_high_dice_coefficient_is_good():
    """Oracle: by hand."""
    assert SEGMENTATION.better(0.9, 0.8) and not SEGMENTATION.better(0.7, 0.8)
    assert MEASURES["dice"].reaches(0.9, 0.8) and MEASURES["dice"].best((0.1, 0.9)) == 0.9


def test_the_network_keeps_a_volume_and_is_covered_by_kfac():
    """Oracle: the shape; the names of the convolutions; orders by hand, 16 * 27 + 1."""
    model = models.build("segmenter3d", classes=5, channels=2)
    assert model(torch.zeros(3, 2, 6, 4, 5)).shape == (3, 5, 6, 4, 5)
    layers, others = models.shapes_of("segmenter3d")
    assert [name for name, _ in others] == ["(votes)"] and len(layers) == 6
    assert {(layer.inputs, layer.outputs) for layer in layers} == {(28, 16), (433, 16), (17, 3)}


def test_a_block_adds_to_its_input():
    """Oracle: convolutions that give 1, whatever the input: the input plus 1."""
    block = ResidualBlock3d(2)
    torch.nn.init.zeros_(block.conv2.weight)
    torch.nn.init.ones_(block.conv2.bias)
    x = torch.randn(1, 2, 3, 4, 5)
    torch.testing.assert_close(block(x), x + 1)


def test_kfac_of_three_dimensions(capsys):
    """Oracle: the check: factors from vectors, autograd, and dense solves where they are small."""
    assert check.main(["segmenter3d", "--input=1,3,3,3", "--classes=3", "--batch=2"]) == 0
    assert "All right" in capsys.readouterr().out


def test_curvature_knows_the_voxels_of_the_loss():
    """Oracle: the voxels of a crop."""
    found = parse([*VOLUME, "--data.size=6"], 1).kfac.estimator.num_per_example_loss_terms
    assert found == 6**3
    assert parse([*VOLUME], 1).kfac.estimator.num_per_example_loss_terms == 16**3


# -- the program ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory, folder):
    """Return the directory of runs on 1 and 2 ranks, and of runs that go on with other ranks."""
    root = tmp_path_factory.mktemp("ranks")
    runs = [(ranks, arguments(root / f"{ranks}", folder)) for ranks in (1, 2)]
    for before, after in ((1, 2), (2, 1)):
        given = arguments(root / f"{before} to {after}", folder)
        runs += [(before, [*given, "--max_steps=2"]), (after, [*given, "--resume=auto"])]
    run_each(runs, root)
    return root


@pytest.mark.gate
@pytest.mark.parametrize("name", ["2", "1 to 2", "2 to 1"])
def test_ranks_change_no_figure(job, name):
    """Oracle: one rank, uninterrupted."""
    keys = ("loss", "train_dice", "test_dice", "test_loss", "test_voxel_accuracy")
    for key in keys:
        one, other = ([row[key] for row in rows(job / n) if key in row] for n in ("1", name))
        assert other == pytest.approx(one, rel=2e-4), key
        assert len(one) == (6 if key == "loss" else 2)


def test_a_test_of_a_checkpoint_is_the_test_of_the_run(job, capsys):
    """Oracle: the last line of the metrics, and the shape of the volume."""
    assert evaluate.main([str(job / "1")]) == 0
    last, told = rows(job / "1")[-1], capsys.readouterr().out
    assert f"dice {last['test_dice']:.4g}, voxel accuracy" in told


def test_a_ball_within_a_ball_is_learned(tmp_path, folder):
    """Oracle: the classes: the brightness of a voxel tells most of them."""
    given = arguments(tmp_path, folder, "--epochs=6", "--lr=0.02", "--data.test_images=32")
    assert train.main(given) == 0
    last = rows(tmp_path)[-1]
    assert last["test_dice"] > 0.75 and last["test_voxel_accuracy"] > 0.85
