from __future__ import annotations

import os
import pickle
import zlib

import numpy as np
import pytest
import torch

from mpikfac_apps.problems import curves, datasets
from support.cifar import python2_pickle

RECORDS = 20
CURVES = 80299471  # checksum of 3,000 images
FILES = [*datasets.TRAIN_FILES, "test_batch"]


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(datasets, "CIFAR_RECORDS", RECORDS)


@pytest.fixture
def records():
    """Return labels and pixels of every file."""
    draw = np.random.default_rng(0)
    return {
        name: (
            draw.integers(10, size=RECORDS, dtype=np.uint8),
            draw.integers(256, size=(RECORDS, datasets.CIFAR_PIXELS), dtype=np.uint8),
        )
        for name in FILES
    }


def write_binary(path, records):
    folder = path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, (labels, pixels) in records.items():
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None], pixels]).tobytes())
    return folder


def write_python(path, records):
    folder = path / "cifar-10-batches-py"
    folder.mkdir()
    for name, (labels, pixels) in records.items():
        (folder / name).write_bytes(python2_pickle(labels, pixels))
    return folder


def test_the_pickles_written_here_are_what_python_reads_as_an_official_file(records):
    """Oracle: `pickle` and numpy."""
    labels, pixels = records["test_batch"]
    content = pickle.loads(python2_pickle(labels, pixels), encoding="bytes")
    assert content[b"labels"] == labels.tolist()
    assert np.array_equal(content[b"data"], pixels)


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("inside", [False, True])
def test_both_layouts_of_cifar10_give_the_same_images(tmp_path, records, write, inside):
    """Oracle: the records in both files."""
    folder = write(tmp_path, records)
    found = datasets.load("cifar10", str(folder if inside else tmp_path))
    labels = np.concatenate([records[name][0] for name in datasets.TRAIN_FILES])
    pixels = np.concatenate([records[name][1] for name in datasets.TRAIN_FILES])
    assert found.train_images.dtype == torch.uint8
    assert np.array_equal(found.train_images.numpy(), pixels.reshape(-1, 3, 32, 32))
    assert np.array_equal(found.train_labels.numpy(), labels)
    assert np.array_equal(found.test_labels.numpy(), records["test_batch"][0])
    assert found.test_labels.dtype == torch.int64


def test_the_first_images_are_used_and_further_files_are_not_needed(tmp_path, records):
    """Oracle: the requested number, with a later file missing."""
    folder = write_binary(tmp_path, records)
    (folder / "data_batch_3.bin").unlink()
    found = datasets.load("cifar10", str(tmp_path), train_images=RECORDS + 5)
    assert len(found.train_images) == len(found.train_labels) == RECORDS + 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_2.bin", None, "No such file.*data_batch_2.bin"),
        ("data_batch_2.bin", lambda raw: raw[:-1], "data_batch_2.bin has 61459 bytes instead of"),
        ("data_batch_2.bin", lambda raw: raw[:-3073], "has 58387 bytes instead of 61460"),
        ("test_batch.bin", lambda raw: raw + b"\0", "test_batch.bin has 61461 bytes instead of"),
        ("test_batch.bin", lambda raw: b"\x0a" + raw[1:], "label 10 of image 0 is not in 0..9"),
        ("test_batch.bin", lambda raw: b"", "test_batch.bin has 0 bytes"),
    ],
)
def test_a_damaged_binary_file_is_refused_in_one_line(tmp_path, records, name, content, message):
    """Oracle: 61,460 bytes: 20 records of a label and 3,072 pixels."""
    path = write_binary(tmp_path, records) / name
    raw = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content(raw))
    with pytest.raises((ValueError, OSError), match=message) as caught:
        datasets.load("cifar10", str(tmp_path))
    assert "\n" not in str(caught.value)


class Hostile:
    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["all", "value", "key"])
def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path, records, protocol, place):
    """Oracle: the directory that the pickle would make."""
    folder = write_python(tmp_path, records)
    victim = tmp_path / "victim"
    hostile = Hostile(os.mkdir, str(victim))
    content = {"all": hostile, "value": {b"data": hostile}, "key": {hostile: 1}}[place]
    (folder / "data_batch_1").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(ValueError, match=r"data_batch_1 is not a batch of CIFAR-10: it requests"):
        datasets.load("cifar10", str(tmp_path))
    assert not victim.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n(U\x011tR.",
        b"(ibuiltins\neval\n.",
        b"(cbuiltins\neval\nU\x011o.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"cnumpy\nload\n.",
        b"Pid\n.",
        b"\x82\x01.",
        b"}U\x04dataN(s.",
        b"N.",
        b"",
        b"not a pickle",
    ],
)
def test_odd_pickles_are_refused(tmp_path, records, opcodes):
    """Oracle: opcodes that build or call, or hold no batch, by pickle's own specification."""
    folder = write_python(tmp_path, records)
    (folder / "test_batch").write_bytes(opcodes)
    with pytest.raises(ValueError, match="test_batch is not a batch of CIFAR-10") as caught:
        datasets.load("cifar10", str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 1, 5, 40, 100, 150, 300, 30_000, -1])
def test_a_truncated_pickle_is_refused(tmp_path, records, kept):
    """Oracle: a whole file cut at many lengths."""
    path = write_python(tmp_path, records) / "data_batch_4"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="data_batch_4 is not a batch of CIFAR-10"):
        datasets.load("cifar10", str(tmp_path))


def test_a_pickle_with_too_few_images_or_a_wrong_label_is_refused(tmp_path, records):
    """Oracle: 19 images of 3,072 pixels; labels 0 to 9."""
    folder = write_python(tmp_path, records)
    labels, pixels = records["test_batch"]
    (folder / "test_batch").write_bytes(python2_pickle(labels[1:], pixels[1:]))
    with pytest.raises(ValueError, match=r"58368 bytes of pixels in shape \(19, 3072\) and 19"):
        datasets.load("cifar10", str(tmp_path))
    (folder / "test_batch").write_bytes(python2_pickle(labels + 10, pixels))
    with pytest.raises(ValueError, match="of image 0 is not in 0..9"):
        datasets.load("cifar10", str(tmp_path))


def test_a_wrong_directory_or_number_of_images_is_refused(tmp_path, records):
    """Oracle: the numbers of images in files and data set."""
    with pytest.raises(ValueError, match=f"data.path={tmp_path} contains neither cifar-10-batches"):
        datasets.load("cifar10", str(tmp_path))
    write_binary(tmp_path, records)
    with pytest.raises(ValueError, match="data.train_images=101: cifar10 has only 100"):
        datasets.load("cifar10", str(tmp_path), train_images=5 * RECORDS + 1)
    with pytest.raises(ValueError, match="data.train_images=1438: digits has only 1437"):
        datasets.load("digits", train_images=1438)
    with pytest.raises(ValueError, match="'mnist' is unknown; try one of digits, cifar10"):
        datasets.load("mnist")


def test_digits_are_split_evenly_and_no_image_is_in_both_parts():
    """Oracle: the repository's counts of the ten digits in the 1,797 images."""
    found = datasets.load("digits")
    assert found.train_images.shape == (1437, 1, 8, 8)
    assert found.test_images.shape == (360, 1, 8, 8)
    counts = found.train_labels.bincount() + found.test_labels.bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert set(found.test_labels.bincount().tolist()) <= {35, 36, 37}
    assert int(torch.cat([found.train_images, found.test_images]).max()) == 16


def test_curves_are_the_same_on_all_machines():
    """Oracle: a stored checksum of the bytes."""
    images = curves.drawn(3000, seed=0)
    assert (images.shape, images.dtype) == ((3000, 1, 28, 28), torch.uint8)
    assert zlib.crc32(images.numpy().data) == CURVES


def test_a_curve_is_a_line_of_ink_through_three_points():
    """Oracle: three points on the middle row; a line of the same brightness above and below."""
    given = np.array([[[4.0, 14.0], [11.0, 14.0], [23.0, 14.0]]])
    image = curves.painted(given).reshape(28, 28)
    assert image[14, 4:24].min() == 255
    assert np.array_equal(image[13], image[15]) and image[13, 4:24].min() > 100
    assert not image[:13].any() and not image[16:].any() and not image[:, 26:].any()


def test_a_number_of_curves_may_be_given_and_the_test_stays():
    """Oracle: the first images of the longer set."""
    few, more = (datasets.load("curves", train_images=count) for count in (10, 30))
    assert torch.equal(few.train_images, more.train_images[:10])
    assert torch.equal(few.test_images, more.test_images)
    assert (len(few.test_images), few.classes) == (5000, 0)
    assert not few.train_labels.any() and len(few.train_labels) == 10


@pytest.mark.parametrize("size", [28, 32, 8])
def test_patches_are_grey_parts_of_the_photos(tmp_path, records, size):
    """Oracle: all grey patches of a photo, by the formula of ITU-R BT.601 in floating point."""
    write_binary(tmp_path, records)
    found = datasets.load("patches", str(tmp_path), size=size, test_images=3)
    assert found.train_images.shape == (5 * RECORDS, 1, size, size)
    for name, patch in (
        ("data_batch_1", found.train_images[0]),
        ("test_batch", found.test_images[0]),
    ):
        photo = records[name][1][0].reshape(3, 32, 32) / 255
        grey = 255 * np.einsum("chw,c->hw", photo, [0.299, 0.587, 0.114])
        windows = np.lib.stride_tricks.sliding_window_view(grey, (size, size))
        apart = abs(windows - patch[0].numpy()).max((2, 3))
        assert apart.min() < 0.51


def test_patches_larger_than_photos_are_refused(tmp_path, records):
    write_binary(tmp_path, records)
    with pytest.raises(ValueError, match="data.size=33: photos have only 32x32 pixels"):
        datasets.load("patches", str(tmp_path), size=33)


def test_synthetic_images_have_the_asked_shape_and_are_the_same_each_time():
    """Oracle: the requested shape, and the same call again."""
    first = datasets.load("synthetic", train_images=40, size=8, classes=5)
    again = datasets.load("synthetic", train_images=40, size=8, classes=5)
    assert first.train_images.shape == (40, 3, 8, 8)
    assert len(first.test_images) == 10
    assert first.classes == 5 > int(first.train_labels.max())
    assert torch.equal(first.train_images, again.train_images)


def write_hundred(path, labels, pixels, layout):
    """Write both files of CIFAR-100; a training file has five times as many images."""
    folder = path / f"cifar-100-{layout}"
    folder.mkdir(exist_ok=True)
    for name, part in (("train", slice(0, 5 * RECORDS)), ("test", slice(5 * RECORDS, None))):
        mine = labels[part], pixels[part]
        if layout == "binary":
            coarse = np.full((len(mine[0]), 1), 19, dtype=np.uint8)
            raw = np.hstack([coarse, mine[0][:, None], mine[1]]).tobytes()
            (folder / f"{name}.bin").write_bytes(raw)
        else:
            (folder / name).write_bytes(python2_pickle(*mine, key=b"fine_labels"))


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar100_has_fine_labels(tmp_path, layout):
    """Oracle: the records in the files; labels 0 to 99."""
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.arange(6 * RECORDS, dtype=np.uint8) % 100)
    pixels = draw.integers(256, size=(6 * RECORDS, datasets.CIFAR_PIXELS), dtype=np.uint8)
    write_hundred(tmp_path, labels, pixels, layout)
    found = datasets.load("cifar100", str(tmp_path))
    assert np.array_equal(torch.cat([found.train_labels, found.test_labels]).numpy(), labels)
    both = torch.cat([found.train_images, found.test_images])
    assert np.array_equal(both.numpy(), pixels.reshape(-1, 3, 32, 32))
    assert (len(found.train_images), found.classes) == (5 * RECORDS, 100)
    labels[3] = 100
    write_hundred(tmp_path, labels, pixels, layout)
    with pytest.raises(ValueError, match="label 100 of image 3 is not in 0..99"):
        datasets.load("cifar100", str(tmp_path))


OWN = """
import torch

def data():
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    return images, torch.tensor([0, 6]), images[:1], torch.tensor([1])

def floats():
    images, labels, *test = data()
    return images.float(), labels, *test

def labels():
    images, labels, *test = data()
    return images, labels - 1, *test

def shapes():
    train, labels, images, test = data()
    return train, labels, images[..., :3], test

def three():
    return data()[:3]

def fails():
    raise RuntimeError("no such\\nserver")
"""
REFUSED = {
    "floats": r"train images are torch.float32 \[2, 3, 4, 5\]; they must be torch.uint8",
    "labels": r"labels are torch.int64 \[2\]; they must be torch.int64 \[2\], with values >= 0",
    "shapes": r"train and test images differ in shape: \[3, 4, 5\] and \[3, 4, 3\]",
    "three": "the function must return a tuple of four tensors: train images, train labels",
    "fails": r"fails\(\) raised RuntimeError: no such",
    "missing": "has no function 'missing'",
}


def test_a_function_of_a_user_is_a_data_set(tmp_path):
    """Oracle: the tensors of the function; 7 classes, by the largest label."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    found = datasets.load(f"{file}:data", train_images=1)
    assert found.train_images.flatten().tolist() == list(range(60))
    assert (len(found.test_images), found.channels, found.classes) == (1, 3, 7)
    assert datasets.form(f"{file}:data", None) == (3, 7)
    for name, message in REFUSED.items():
        with pytest.raises(ValueError, match=message) as refused:
            datasets.load(f"{file}:{name}")
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"other.py is not a file"):
        datasets.load(f"{tmp_path / 'other.py'}:data")
