"""Load data sets by name, as whole tensors of bytes or as lists of image files.

`digits` comes with the program, `curves` and `synthetic` are generated, `text` is read from text
files, `volume` from a brain scan, and `cifar10`, `cifar100` and `patches` from either of CIFAR's
two official layouts. `folder` and `packed` are lists of images, which are read during training. The
readers of these data sets never execute code from a file. FILE.py:FUNCTION is a user's function
that returns a data set.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpikfac import files
from mpikfac_apps.images import folder, packed
from mpikfac_apps.images.listing import Listing
from mpikfac_apps.problems import curves, own
from mpikfac_apps.problems.language import corpus
from mpikfac_apps.problems.volumes import crops
from mpikfac_apps.text import is_own

CIFAR_RECORDS = 10_000  # records per file; the training file of CIFAR-100 has 5 times as many
CIFAR_PIXELS = 3 * 32 * 32
CIFAR_LIMIT = 2**25  # maximum size of a file in bytes; published files have 31 million bytes
CIFAR_INSTRUCTIONS = 2**16  # maximum instructions in a pickle; published files have about 40,000
LUMA = (299, 587, 114)  # thousandths of red, green and blue in grey (ITU-R BT.601)
TRAIN_FILES = [f"data_batch_{i}" for i in range(1, 6)]


@dataclass(frozen=True)
class Cifar:
    """The layout of the two archives of a CIFAR data set, the binary and the Python version.

    Attributes:
        name: the name of the data set.
        folders: the names of the folders in the binary and the Python version.
        train, test: the names of the files, without the suffix of the binary version.
        times: the number of records in a training file, divided by the number in the test file.
        classes: the number of classes.
        before: the number of bytes before the label in a binary record.
        key: the key of the labels in the dictionary of a file of the Python version.
    """

    name: str
    folders: tuple[str, str]
    train: Sequence[str]
    test: str
    times: int
    classes: int
    before: int
    key: bytes


TEN = Cifar(
    "CIFAR-10",
    ("cifar-10-batches-bin", "cifar-10-batches-py"),
    TRAIN_FILES,
    "test_batch",
    times=1,
    classes=10,
    before=0,
    key=b"labels",
)
HUNDRED = Cifar(
    "CIFAR-100",
    ("cifar-100-binary", "cifar-100-python"),
    ("train",),
    "test",
    times=5,
    classes=100,
    before=1,  # the coarse label
    key=b"fine_labels",
)


@dataclass(frozen=True)
class Dataset:
    """Images as bytes `[n, channels, h, w]` and int64 labels `[n]`, for training and testing.

    For a text, "images" are windows of bytes `[n, size]`, and the label of each byte is the byte
    that follows it. For a volume, "images" are crops `[n, 1, d, h, w]`, and the labels are the
    classes of the voxels, as bytes.

    Attributes:
        classes: the number of classes; 0 if images have no labels (all labels are then 0), and 256
            for a text.
        white: the value of a white pixel.
        about: a one-line description for the log, if the data can differ between machines.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    white: int = 255
    about: str = ""

    @property
    def channels(self) -> int:
        """The number of channels of an image, or the number of tokens in a window of text."""
        return self.train_images.shape[1]

    @property
    def checksums(self) -> dict[str, int]:
        """Checksums of training labels, training pixels and test set, for a restart to compare."""
        return {
            "images": _crc(self.train_labels),
            "pixels": _crc(self.train_images),
            "tests": _crc(self.test_images, _crc(self.test_labels)),
        }

    def part(self, train: int | None, test: int | None) -> Dataset:
        """Return the data set with only the first `train` and `test` images (None for all)."""
        return replace(
            self,
            train_images=self.train_images[:train],
            train_labels=self.train_labels[:train],
            test_images=self.test_images[:test],
            test_labels=self.test_labels[:test],
        )


def _crc(values: Tensor, before: int = 0) -> int:
    return zlib.crc32(values.contiguous().numpy().data, before)


def load(
    name: str,
    path: str | None = None,
    train_images: int | None = None,
    test_images: int | None = None,
    size: int | None = None,
    classes: int | None = None,
) -> Dataset | Listing:
    """Return a data set by name.

    Args:
        path: for cifar10, cifar100 and patches, the directory of the files or its parent; for
            folder, the folder; for packed, the file; for text, a file or a directory of text files;
            for volume, the folder with image.nii.gz and labels.nii.gz.
        train_images: the number of training images to use: the first ones or, for folder and
            packed, evenly spaced ones; for curves and synthetic, the number of images to generate.
        test_images: the number of test images to use: the first ones or, for folder and packed,
            evenly spaced ones.
        size: for patches, synthetic, folder and packed, the side length in pixels; for text, the
            bytes per window; for volume, the side length of a crop in voxels.
        classes: for synthetic, the number of classes.

    Raises:
        ValueError: a file or an argument is invalid; the message states the value and a remedy.
        OSError: a file cannot be read.
    """
    entry, arguments = source(name), {"path": path, "size": size, "classes": classes}
    chosen = {key: arguments[key] for key in entry.takes if arguments.get(key) is not None}
    data = entry.load(images=train_images, **chosen)
    _check_count("train_images", train_images, len(data.train_images), name)
    _check_count("test_images", test_images, len(data.test_images), name)
    return data.part(train_images, test_images)


def _check_count(key: str, count: int | None, images: int, name: str) -> None:
    if count and count > images:
        raise ValueError(f"data.{key}={count}: {name} has only {images}")


def digits(images: int | None = None) -> Dataset:  # noqa: ARG001 (as all loaders)
    """Return 1,797 handwritten digits of 8x8 pixels; a fifth of each class is for testing.

    The test set has 360 images. `images` is ignored, because `load` selects the first images.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels = torch.from_numpy(file["images"])[:, None]
        labels = torch.from_numpy(file["labels"]).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[labels.argsort(stable=True)[::5]] = True
    return Dataset(pixels[~test], labels[~test], pixels[test], labels[test], 10, white=16)


def smooth_curves(images: int | None = None) -> Dataset:
    """Return images of smooth curves, 28x28 pixels: `images` for training, 5,000 for testing."""
    return unlabelled(curves.drawn(images or 20_000, seed=0), curves.drawn(5_000, seed=1))


def unlabelled(train: Tensor, test: Tensor) -> Dataset:
    """Return a data set of images without labels."""
    none = (torch.zeros(len(images), dtype=torch.int64) for images in (train, test))
    return Dataset(train, next(none), test, next(none), classes=0)


def synthetic(images: int | None = None, size: int = 32, classes: int = 10) -> Dataset:
    """Return noisy images of 4x4 patterns, one pattern per class; a fifth is for testing."""
    images, channels = images or 1024, 3
    generator = torch.Generator().manual_seed(0)
    total = images + max(1, images // 4)
    labels = torch.randint(classes, (total,), generator=generator)
    pattern = torch.randint(128, (classes, channels, 4, 4), generator=generator, dtype=torch.uint8)
    pattern = F.interpolate(pattern, size=(size, size), mode="nearest")
    pixels = torch.randint(
        128, (total, channels, size, size), generator=generator, dtype=torch.uint8
    )
    for i in range(0, total, 1024):  # in parts, because a whole copy might not fit in memory
        pixels[i : i + 1024] += pattern[labels[i : i + 1024]]
    return Dataset(pixels[:images], labels[:images], pixels[images:], labels[images:], classes)


def text(
    path: str | None = None,
    images: int | None = None,  # noqa: ARG001 (as all loaders)
    size: int = 64,
) -> Dataset:
    """Return windows of a text; the last tenth of the text is for testing.

    `images` is ignored, because `load` selects the first windows.
    """
    read = corpus.read(path)
    parts = read.tokens.tensor_split([len(read.tokens) - len(read.tokens) // 10])
    (train, labels), (test, test_labels) = (corpus.windows(part, size) for part in parts)
    return Dataset(train, labels, test, test_labels, corpus.TOKENS, about=read.about)


def volume(
    path: str | None = None,
    images: int | None = None,  # noqa: ARG001 (as all loaders)
    size: int = 16,
) -> Dataset:
    """Return crops of a volume; the first half is for training, the second half for testing.

    `images` is ignored, because `load` selects the first crops.
    """
    read = crops.read(path)
    (train, labels), (test, test_labels) = (half.crops(size) for half in read.halves())
    count = 1 + int(read.classes.max())
    return Dataset(train, labels, test, test_labels, count, about=read.about)


def cifar(path: str, images: int | None = None, kind: Cifar = TEN) -> Dataset:
    """Load a CIFAR data set in the binary or the Python layout; read only the files needed."""
    root = Path(path)
    layouts = dict(zip(kind.folders, ((read_binary, ".bin"), (read_python, ""))))
    candidates = [place for name in layouts for place in (root, root / name) if place.name == name]
    folders = [place for place in candidates if place.is_dir()]
    if not folders:
        raise ValueError(
            f"data.path={path} contains neither {' nor '.join(layouts)}; "
            f"pass the directory in which the {kind.name} archive was unpacked"
        )
    read, suffix = layouts[folders[0].name]
    records = kind.times * CIFAR_RECORDS
    needed = kind.train[: -(-images // records)] if images else kind.train
    train = [read(folders[0] / f"{name}{suffix}", kind, kind.times) for name in needed]
    test = read(folders[0] / f"{kind.test}{suffix}", kind)
    return Dataset(
        torch.from_numpy(np.concatenate([pixels for pixels, _ in train])).view(-1, 3, 32, 32),
        torch.from_numpy(np.concatenate([labels for _, labels in train])),
        torch.from_numpy(test[0]).view(-1, 3, 32, 32),
        torch.from_numpy(test[1]),
        kind.classes,
    )


def patches(path: str, images: int | None = None, size: int = 28) -> Dataset:
    """Return a grey patch from a random position in each CIFAR-10 photo, without labels.

    Raises:
        ValueError: the photos are smaller than `size`.
    """
    photos = cifar(path, images)
    side = photos.train_images.shape[-1]
    if size > side:
        raise ValueError(f"data.size={size}: photos have only {side}x{side} pixels")
    generator = torch.Generator().manual_seed(0)
    return unlabelled(
        grey_patches(photos.train_images, size, generator),
        grey_patches(photos.test_images, size, generator),
    )


def grey_patches(photos: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return one grey patch of each photo `[n, 3, h, w]`, as bytes `[n, 1, size, size]`."""
    n, side = len(photos), photos.shape[-1]
    top, left = torch.randint(side - size + 1, (2, n), generator=generator)
    windows = photos.unfold(2, size, 1).unfold(3, size, 1)  # not copied
    chosen = windows[torch.arange(n), :, top, left]
    red, green, blue = (weight * chosen[:, c].int() for c, weight in enumerate(LUMA))
    return ((red + green + blue + 500) // 1000).to(torch.uint8)[:, None]


def read_binary(path: Path, kind: Cifar = TEN, times: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels `[n, 3072]` and labels `[n]` from a file of CIFAR's binary version."""
    raw = np.frombuffer(files.read_bytes(path, times * CIFAR_LIMIT, links=True), dtype=np.uint8)
    records, size = times * CIFAR_RECORDS, kind.before + 1 + CIFAR_PIXELS
    if len(raw) != records * size:
        raise ValueError(
            f"{path} has {len(raw)} bytes instead of {records * size}; unpack it again"
        )
    table = raw.reshape(records, size)
    pixels = table[:, kind.before + 1 :].copy()
    return pixels, checked_labels(path, table[:, kind.before], kind.classes)


def checked_labels(path: Path, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return labels as int64, after checking that they are at least 0 and below `classes`."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ValueError(
            f"{path}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0..{classes - 1}"
        )
    return labels.astype(np.int64)


def read_python(path: Path, kind: Cifar = TEN, times: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels `[n, 3072]` and labels `[n]` from a pickle, without executing its code."""
    pickled = files.read_bytes(path, times * CIFAR_LIMIT, links=True)
    try:
        check_size(pickled, times * CIFAR_INSTRUCTIONS)
        content = DataOnlyUnpickler(io.BytesIO(pickled), encoding="bytes").load()
        _, shape, dtype, by_columns, raw = content[b"data"].state
        stored = (shape, dtype.arguments[:1], bool(by_columns))
        labels = flat_labels(content[kind.key])
        pixels = np.frombuffer(raw, dtype=np.uint8)
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path} is not a batch of {kind.name}: {files.one_line(error)}"
        ) from error
    expected = (times * CIFAR_RECORDS, CIFAR_PIXELS)
    complete = (pixels.size, labels.size) == (math.prod(expected), expected[0])
    if stored != (expected, (b"u1",), False) or not complete:
        form = reprlib.repr(shape)
        raise ValueError(
            f"{path} has {pixels.size} bytes of pixels in shape {form} and {labels.size} labels "
            f"instead of {math.prod(expected)} bytes in shape {expected} and {expected[0]} labels; "
            "unpack it again"
        )
    return pixels.reshape(expected).copy(), checked_labels(path, labels, kind.classes)


def check_size(pickled: bytes, most: int) -> None:
    """Check that loading a pickle will not take much more memory than the size of the file.

    Raises:
        ValueError: the pickle has more than `most` instructions, ends within an instruction,
            requests a memo table of more than `most` entries, or contains integers of more than 64
            bits, which could be slow as dictionary keys.
    """
    for count, (instruction, argument, _) in enumerate(pickletools.genops(pickled)):
        place = argument if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") else 0
        if max(count, place or 0) > most:
            raise ValueError(f"it has more than {most:,} instructions")
        if isinstance(argument, int) and abs(argument) >= 2**63:
            raise ValueError("it contains an integer of more than 64 bits")


def flat_labels(labels: object) -> np.ndarray:
    """Return a list of integers as an array.

    Raises:
        ValueError: `labels` is not a list of integers; for example, it contains itself.
    """
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise ValueError("labels are not a list of whole numbers")
    return np.array(labels, dtype=np.int64)


class Inert:
    """A replacement for the objects in a pickle; it only stores the values that it is given."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class DataOnlyUnpickler(pickle.Unpickler):
    """Read a pickle of plain data and numpy arrays; arrays become `Inert` objects.

    A pickle is a program that can call anything it can name; with this reader, it can call only
    `Inert`.
    """

    ALLOWED = (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )

    def find_class(self, module: str, name: str) -> type[Inert]:
        """Return `Inert` for the names that a file of CIFAR's Python version needs."""
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"it requests {module}.{name}, which images and labels never need")
        return Inert


@dataclass(frozen=True)
class Source:
    """An entry of the registry `DATASETS`: a data set, and the options that it supports.

    Attributes:
        load: returns the data set, given `images` and the options in `takes`.
        channels: the number of channels of an image; 0 for a text.
        size: the side length of an image in pixels, or the number of tokens in a window. It is the
            default if `takes` contains "size", and None if it depends on the data.
        classes: the number of classes. It is the default if `takes` contains "classes", and None if
            it depends on the data.
        holds: what a network can learn from the data.
        takes: the options in the group `data` that this data set supports but others may not.
        needs: an option in the group `data` that must be set, and what it means.
        files: whether images are read from files during training.
    """

    load: Callable[..., Dataset | Listing]
    channels: int = 3
    size: int | None = 32
    classes: int | None = 10
    holds: tuple[str, ...] = ("labels", "pixels")
    takes: tuple[str, ...] = ()
    needs: tuple[str, str] | None = None
    files: bool = False


PIXELS = ("pixels",)
ARCHIVE = ("path", "the directory in which the archive of CIFAR-10 was unpacked")
ARCHIVE_100 = ("path", "the directory in which the archive of CIFAR-100 was unpacked")
of_files = partial(
    Source,
    size=224,
    classes=None,
    takes=("path", "size", "workers", "max_broken_images"),
    files=True,
)

DATASETS = {
    "digits": Source(digits, channels=1, size=8),
    "cifar10": Source(cifar, takes=("path",), needs=ARCHIVE),
    "cifar100": Source(
        partial(cifar, kind=HUNDRED), classes=100, takes=("path",), needs=ARCHIVE_100
    ),
    "curves": Source(smooth_curves, channels=1, size=28, holds=PIXELS),
    "patches": Source(
        patches, channels=1, size=28, holds=PIXELS, takes=("path", "size"), needs=ARCHIVE
    ),
    "synthetic": Source(synthetic, takes=("size", "classes")),
    "folder": of_files(
        folder.listed, needs=("path", "a folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    ),
    "packed": of_files(
        packed.listed,
        takes=("path", "size", "workers", "max_broken_images", "cache"),
        needs=("path", "a file written by mpikfac pack"),
    ),
    "text": Source(text, channels=0, size=64, classes=256, holds=("text",), takes=("path", "size")),
    "volume": Source(
        volume, channels=1, size=16, classes=None, holds=("voxels",), takes=("path", "size")
    ),
}


def source(name: str) -> Source:
    """Return the registry entry for a data set, or an entry for FILE.py:FUNCTION.

    Raises:
        ValueError: no data set has that name; the message lists all names.
    """
    if is_own(name):
        own.check_file(name)
        return Source(partial(from_function, name), size=None, classes=None)
    if name not in DATASETS:
        names = f"{name}:FUNCTION" if name.endswith(".py") else f"one of {', '.join(DATASETS)}"
        raise ValueError(f"data.name={name!r} is unknown; try {names}")
    return DATASETS[name]


@cache
def form(name: str, path: str | None) -> tuple[int, int]:
    """Return the numbers of channels and classes of a data set; read the data only if necessary.

    Raises:
        ValueError: the data set cannot be read.
    """
    entry = source(name)
    data = entry if entry.classes is not None else load(name, path)
    return data.channels, data.classes or 0


def from_function(name: str, images: int | None = None) -> Dataset:  # noqa: ARG001 (as all loaders)
    """Return the data set that FILE.py:FUNCTION returns: four tensors, or a `Dataset`.

    Raises:
        ValueError: the function returns anything else; the message states what is expected.
    """
    data = own.result(name)
    if isinstance(data, Dataset):
        return data
    if not (
        isinstance(data, tuple) and len(data) == 4 and all(isinstance(t, Tensor) for t in data)
    ):
        raise ValueError(
            f"data.name={name}: the function must return a tuple of four tensors: "
            "train images, train labels, test images, test labels"
        )
    for part, images_of, labels in (("train", *data[:2]), ("test", *data[2:])):
        check_part(f"data.name={name}: {part}", images_of, labels)
    if data[0].shape[1:] != data[2].shape[1:]:
        shapes = " and ".join(str(list(t.shape[1:])) for t in (data[0], data[2]))
        raise ValueError(f"data.name={name}: train and test images differ in shape: {shapes}")
    return Dataset(*data, 1 + int(max(data[1].max(), data[3].max())))


def check_part(what: str, images: Tensor, labels: Tensor) -> None:
    """Check the training or test images and labels that a user's function returned.

    Args:
        what: the option and the part of the data, for error messages.

    Raises:
        ValueError: a tensor has the wrong dtype, shape or range.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or not len(images):
        raise ValueError(
            f"{what} images are {images.dtype} {list(images.shape)}; they must be torch.uint8 "
            "[images, channels, height, width]"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1] or labels.min() < 0:
        raise ValueError(
            f"{what} labels are {labels.dtype} {list(labels.shape)}; they must be torch.int64 "
            f"[{len(images)}], with values >= 0"
        )
