"""Images in files: the same batches for all numbers of ranks and processes, and no process left."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import mpikfac
from mpikfac_apps.images import decoding, folder
from mpikfac_apps.images.decoders import Decoders
from mpikfac_apps.images.listing import ImagePlace
from mpikfac_apps.inspecting import pack
from mpikfac_apps.options import by_epoch
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.problems import datasets
from mpikfac_apps.training import settings
from mpikfac_apps.training.batches import FileBatches, Normalise
from support import pictures
from support.pace import paced

CPU = torch.device("cpu")
SIZE = 14
STEPS = 8  # 4 steps are an epoch
QUICK = (
    *("--model=digits_cnn", "--data.augment", "--batch=12", "--epochs=2"),
    *("--log_every=1", "--threads=1", "--lr=0.01"),
)
BROKEN = "train/bee/03.jpg"
OWN = """
import torch

def data():
    images = torch.randint(256, (60, 3, 9, 9), generator=torch.Generator().manual_seed(0))
    images, labels = images.to(torch.uint8), torch.arange(60) % 7
    return images[:48], labels[:48], images[48:], labels[48:]
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return pictures.noise(tmp_path_factory.mktemp("noise"))


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "images.h5"
    assert pack.main([str(images), str(out)]) == 0
    return out


def stream(path, rank=0, ranks=1, *, batch=12, seed=0, name="folder", **chosen):
    data = DataOptions(name=name, **{"size": SIZE, "augment": True, "workers": 0} | chosen)
    found = datasets.load(name, str(path), size=data.size)
    return FileBatches(found, batch, data, seed=seed, device=CPU, rank=rank, ranks=ranks)


def epoch_of(mine, epoch=0, first=0):
    steps = mine.calendar.at(epoch).steps
    found = [mine.get(epoch, index) for index in range(first, steps)]
    mine.close()
    return found


def same(found, expected):
    """Return whether two lists of images and labels are equal."""
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other))


def whole(parts):
    return [tuple(torch.cat(tensors) for tensors in zip(*parts))]


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shares_of_all_ranks_are_the_global_batch_in_order(images, ranks, augment):
    """Oracle: a single rank."""
    expected = epoch_of(stream(images, augment=augment), epoch=3)
    shares = [epoch_of(stream(images, r, ranks, augment=augment), epoch=3) for r in range(ranks)]
    for index, batch in enumerate(expected):
        assert same(whole([share[index] for share in shares]), [batch])


def test_processes_change_nothing(images):
    """Oracle: the rank itself decodes."""
    one, several = stream(images), stream(images, workers=3)
    assert same(list(several.test(4)), list(one.test(4)))  # while a process decodes a batch
    assert same(epoch_of(several, 1), epoch_of(one, 1))


def test_a_resumed_epoch_goes_on_with_the_same_images(images):
    """Oracle: the whole epoch; a batch is asked twice, and out of order."""
    expected = epoch_of(stream(images), 2)
    assert same(epoch_of(stream(images), 2, first=3), expected[3:])
    mine = stream(images, workers=1)
    assert same([mine.get(2, 3), mine.get(2, 1), mine.get(2, 1)], [expected[i] for i in (3, 1, 1)])
    mine.close()


def test_epochs_and_seeds_differ(images):
    firsts = [epoch_of(stream(images, seed=s), e)[0][0] for s in (0, 1) for e in (0, 1)]
    assert not any(torch.equal(firsts[0], other) for other in firsts[1:])


def test_an_epoch_takes_every_image_once_and_drops_the_partial_batch(tmp_path):
    """Oracle: images of a colour that is the number of the image; 48 images, batches by epoch."""
    path = pictures.plain(tmp_path)
    mine = stream(path, batch=by_epoch.read("10 until 1, 16", int))
    for epoch, (size, steps) in enumerate([(10, 4), (16, 3)]):
        taken = [mine.get(epoch, index) for index in range(steps)]
        assert mine.calendar.at(epoch).steps == steps
        numbers = torch.cat([images[:, 0, 0, 0] for images, _ in taken]).tolist()
        labels = torch.cat([labels for _, labels in taken]).tolist()
        assert len(set(numbers)) == len(numbers) == size * steps
        assert labels == [number // pictures.COUNTS["train"] for number in numbers]
    tested = [batch for rank in range(4) for batch in stream(path, rank, 4).test(2)]
    assert [int(image[0, 0, 0]) for images, _ in tested for image in images] == list(range(15))
    assert torch.cat([labels for _, labels in tested]).tolist() == [i // 5 for i in range(15)]


def test_fewer_images_are_spread_over_the_classes(images):
    """Oracle: the requested numbers; the list is sorted by class."""
    found = datasets.load("folder", str(images), train_images=6, test_images=3)
    assert found.train_images.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.test_images.labels.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="data.train_images=49: folder has only 48"):
        datasets.load("folder", str(images), train_images=49)


def test_a_packed_file_is_the_folder_bit_for_bit(images, packed):
    """Oracle: the folder."""
    both = stream(images), stream(packed, name="packed")
    firsts, lasts, samples, means = [], [], [], []
    for mine in both:
        samples.append([(part,) for part in mine.sample(20, 8)])
        means.append(Normalise(mine.pixels(), CPU))
        lasts.append(list(mine.test(4)))
        firsts.append(epoch_of(mine))
    assert same(*firsts) and same(*lasts) and same(*samples)
    assert torch.equal(means[0].mean, means[1].mean)


def test_mean_and_variance_are_of_the_images_that_the_test_would_see(images):
    """Oracle: torch's mean and variance in float64 over all training images (48 < 1,024)."""
    mine = stream(images, augment=False)
    normalise = Normalise(mine.pixels(), CPU)
    seen = mine.first(48)
    found = normalise(seen).double()
    assert found.mean((0, 2, 3)).abs().max() < 1e-5
    assert (found.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    assert seen.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [(50, 30), (20, 47), (16, 16)])
def test_the_centre_is_cut_as_said(size):
    """Oracle: the operations of Pillow, one by one, for a network of 14x14 pixels."""
    width, height = size
    draw = np.random.default_rng(1)
    image = Image.fromarray(draw.integers(256, size=(height, width, 3), dtype=np.uint8))
    scaled = image.resize(
        (16 * width // min(size), 16 * height // min(size)), Image.Resampling.BILINEAR
    )
    found = np.asarray(decoding.centre(image, SIZE))
    left, top = round((scaled.width - SIZE) / 2), round((scaled.height - SIZE) / 2)
    assert np.array_equal(found, np.asarray(scaled)[top : top + SIZE, left : left + SIZE])


@pytest.mark.parametrize("size", [(500, 375), (64, 64), (200, 10), (10, 200)])
def test_random_parts_have_the_named_shares_and_ratios(size):
    """Oracle: the bounds of AREA and RATIO, with half a pixel of rounding."""
    width, height = size
    draw = np.random.default_rng(0)
    boxes = np.array([decoding.drawn_box(width, height, draw) for _ in range(400)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    assert ((across + 0.5) * (down + 0.5) >= 0.08 * width * height * 0.9).all() or 10 in size
    assert ((across + 0.5) / (down - 0.5) >= 3 / 4).all()
    assert ((across - 0.5) / (down + 0.5) <= 4 / 3).all()
    if 10 not in size:
        shares = across * down / (width * height)
        assert shares.min() < 0.12 and shares.max() > 0.8 and 0.4 < shares.mean() < 0.6


def test_half_of_the_random_parts_are_mirrored():
    """Oracle: an image that grows brighter to the right."""
    row = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 64, 0).repeat(3, 2)
    image = Image.fromarray(row)
    parts = [np.asarray(decoding.random_crop(image, 8, (0, 0, i)), int) for i in range(200)]
    assert 70 < sum(part[0, -1, 0] < part[0, 0, 0] for part in parts) < 130


def shorten(path):
    path.write_bytes(path.read_bytes()[:-200])


def test_a_broken_image_is_replaced_by_the_next_of_the_class(tmp_path, caplog):
    """Oracle: batches of a folder in which the broken files are the following files."""
    path = pictures.noise(tmp_path / "broken", {"train": 5, "val": 2})
    mended = pictures.noise(tmp_path / "mended", {"train": 5, "val": 2})
    wrong = {"train/ant/01": "train/ant/02", "train/cat/04": "train/cat/00"}
    for name, following in wrong.items():
        shorten(path / f"{name}.jpg")
        (mended / f"{name}.jpg").write_bytes((mended / f"{following}.jpg").read_bytes())
    expected = epoch_of(stream(mended, batch=15))
    for workers in (0, 2):
        mine = stream(path, batch=15, max_broken_images=2, workers=workers)
        found = [mine.get(0, 0)]
        assert same(found, expected)
        caplog.clear()
        for _ in range(2):
            mine.share_broken(mpikfac.world())
        assert [f"{path / name}.jpg" in line for name, line in zip(wrong, caplog.messages)] == [
            True,
            True,
        ]
        assert len(caplog.messages) == 2
        mine.close()
    too_many = r"raise data\.max_broken_images \(now 1\)"
    with pytest.raises(mpikfac.UserError, match=too_many) as refused:
        stream(path, batch=15, max_broken_images=1).get(0, 0)
    assert "\n" not in str(refused.value)


@pytest.mark.timeout(120)
def test_many_broken_images_do_not_block_the_process_that_decodes(tmp_path):
    """Oracle: all positions; lists and results are longer than the memory of a connection."""
    gone = str(tmp_path / ("gone" * 50))
    jobs = [(position, ImagePlace(f"{gone}{position}"), None) for position in range(3000)]
    decoders = Decoders(workers=1, size=4, room=len(jobs))
    try:
        for ticket in [decoders.begin(slot, jobs) for slot in range(3)]:
            assert [position for position, _ in decoders.faults(ticket)] == list(range(3000))
    finally:
        decoders.close()


def test_the_first_broken_image_ends_the_run(tmp_path):
    """Oracle: the name of the only broken file; a class without a good image."""
    path = pictures.noise(tmp_path, {"train": 4, "val": 1})
    shorten(path / "val/bee/00.jpg")
    with pytest.raises(mpikfac.UserError, match=f"{path}/val/bee/00.jpg cannot be decoded"):
        list(stream(path).test(3))
    with pytest.raises(mpikfac.UserError, match=r"bee/00.jpg: all images of the class are broken"):
        list(stream(path, max_broken_images=5).test(3))


@pytest.mark.parametrize(
    ("pixels", "suffix"),
    [
        (np.full((20, 20), 300, np.uint16), "png"),
        (np.full((20, 20), 300, np.int32), "tiff"),
        (np.full((20, 20), 0.5, np.float32), "tiff"),
    ],
    ids=["png of 16 bits", "tiff of 32 bits", "tiff of fractions"],
)
def test_pixels_of_more_than_8_bits_are_refused(tmp_path, capsys, pixels, suffix):
    """Oracle: the line; Pillow alone makes such pixels white, or black."""
    path = pictures.plain(tmp_path / "images", {"train": 2, "val": 1})
    Image.fromarray(pixels).save(path / f"val/bee/00.{suffix}")
    Image.fromarray(pixels.astype(np.uint8)).save(path / "val/ant/00.png")  # grey is fine
    with pytest.raises(mpikfac.UserError, match=r"bee/00\..*: its pixels have 16 or 32 bits"):
        list(stream(path).test(3))
    for more in ((), ("--size=8",)):
        assert pack.main([str(path), str(tmp_path / "out.h5"), *more]) == 2
        assert "its pixels have 16 or 32 bits" in capsys.readouterr().err


def test_a_file_that_is_no_image_is_told_the_formats(tmp_path):
    """Oracle: the line; the text is what a clone without large files has in an image's place."""
    path = pictures.plain(tmp_path, {"train": 2, "val": 1})
    (path / "val/bee/00.png").write_text("version https://git-lfs.github.com/spec/v1")
    told = r"bee/00.png cannot be decoded: it is not an image in one of the formats BMP, JPEG"
    with pytest.raises(mpikfac.UserError, match=told):
        list(stream(path).test(3))


LAYOUTS = {
    "nothing": ((), "has no subfolder named train; pass a folder with train/CLASS"),
    "no test": (("train/a/1.jpg",), "has no subfolder named val or test; pass a folder with"),
    "no class": (("train/1.jpg", "val/a/1.jpg"), "train has no folders of classes"),
    "another class": (
        ("train/a/1.jpg", "val/b/1.jpg"),
        "val/b does not belong to a class: .* has no b",
    ),
    "an empty class": (("train/a/1.jpg", "train/b/1.txt", "val/a/1.jpg"), "b has no images"),
    "an empty test": (("train/a/1.jpg", "test/a/.1.jpg"), "test has no images"),
}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_another_layout_is_refused_in_a_line(tmp_path, case):
    """Oracle: the layout of the page."""
    names, message = LAYOUTS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message) as refused:
        folder.listed(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_folder_is_sorted_and_other_files_are_passed_over(tmp_path):
    """Oracle: sorted names, by hand."""
    for name in ("train/b/2.JPEG", "train/b/10.png", "train/a/x.webp", "train/a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "test/b").mkdir(parents=True)
    (tmp_path / "test/b/é.jpg").touch()
    listing, classes = folder.with_names(str(tmp_path), 8)
    assert classes == ["a", "b"]
    paths = [listing.train_images.place(i).path for i in range(3)]
    assert paths == [str(tmp_path / "train" / n) for n in ("a/x.webp", "b/10.png", "b/2.JPEG")]
    assert listing.test_images.place(0) == ImagePlace(str(tmp_path / "test/b/é.jpg"))
    assert listing.test_images.labels.tolist() == [1]


def test_packed_images_may_be_smaller(images, tmp_path, capsys):
    """Oracle: Pillow's size of each image, and bytes of small images as they are."""
    out = tmp_path / "small.h5"
    assert pack.main([str(images), str(out), "--size=30"]) == 0
    assert "48 training images, 15 test images, classes: 3" in capsys.readouterr().out
    found = datasets.load("packed", str(out)).train_images
    before = datasets.load("folder", str(images)).train_images
    for number in range(len(found)):
        small, large = (decoding.content(part.place(number)) for part in (found, before))
        sides = [Image.open(io.BytesIO(content)).size for content in (small, large)]
        assert min(sides[0]) == min(30, *sides[1])
        assert (small == large) == (min(sides[1]) <= 30)
    assert found.labels.tolist() == before.labels.tolist()
    assert os.listdir(tmp_path) == ["small.h5"]


def test_a_packed_file_is_complete_or_absent(tmp_path, capsys):
    """Oracle: the names in the directory after a failure; the content of an existing file."""
    path = pictures.noise(tmp_path / "images", {"train": 4, "val": 1})
    shorten(path / "train/cat/02.jpg")
    out = tmp_path / "out.h5"
    assert pack.main([str(path), str(out), "--size=16"]) == 2
    assert f"{path}/train/cat/02.jpg cannot be decoded" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["images"]
    out.write_text("mine")
    assert pack.main([str(path), str(out)]) == 2
    assert out.read_text() == "mine"
    with pytest.raises(ValueError, match=r"out.h5 is not an HDF5 file written by mpikfac"):
        datasets.load("packed", str(out))
    mpikfac.checkpoint.write_shard(out, {"images": torch.zeros(3000, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"out.h5 was not written by mpikfac pack: it lacks"):
        datasets.load("packed", str(out))


@pytest.mark.parametrize(
    "wrong",
    [
        {"labels": torch.zeros(3, 2, dtype=torch.int64)},
        {"labels": torch.tensor([0, 1, 2])},  # there are two classes
        {"labels": torch.zeros(3, dtype=torch.int32)},
        {"starts": torch.tensor([0, 20, 10, 30])},
        {"starts": torch.tensor([0, 10, 20, 31])},
        {"train": 3},
    ],
    ids=[
        *("a table of labels", "an unknown class", "labels of 4 bytes"),
        *("starts that go back", "starts behind the end", "no test image"),
    ],
)
def test_items_that_no_program_wrote_are_refused(tmp_path, wrong):
    """Oracle: the right items beside the wrong item, which are read."""
    right = {
        "images": torch.zeros(30, dtype=torch.uint8),
        "starts": torch.tensor([0, 10, 20, 30]),
        "labels": torch.tensor([0, 1, 1]),
        **{"train": 2, "size": 0, "classes": '["a", "b"]'},
    }
    for name, items in (("right", right), ("wrong", right | wrong)):
        mpikfac.checkpoint.write_shard(tmp_path / f"{name}.h5", items)
    assert datasets.load("packed", str(tmp_path / "right.h5")).classes == 2
    with pytest.raises(ValueError, match="is damaged; create it again with mpikfac pack"):
        datasets.load("packed", str(tmp_path / "wrong.h5"))


def test_a_shortened_packed_file_is_refused(packed, tmp_path):
    """Oracle: a whole file cut at several lengths."""
    content = packed.read_bytes()
    for kept in (0, 100, 1000, len(content) // 2, len(content) - 1):
        cut = tmp_path / "cut.h5"
        cut.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=r"cut.h5 is "):
            datasets.load("packed", str(cut))


RANK = """
import sys, time, torch, mpi4py.MPI
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.problems import datasets
from mpikfac_apps.training.batches import FileBatches
data = DataOptions(name="folder", size=14, workers=2)
mine = FileBatches(datasets.load("folder", sys.argv[1], size=14), 12, data, seed=0,
              device=torch.device("cpu"))
mine.get(0, 0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.gate
def test_processes_know_no_mpi_and_end_with_a_killed_rank(images):
    """Oracle: the libraries in the processes' memory, and the process table."""
    env = os.environ | {"OMPI_COMM_WORLD_RANK_OF_TEST": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(images)], stdout=subprocess.PIPE, text=True, env=env
    ) as rank:
        assert rank.stdout.readline() == "ready\n"
        found = psutil.Process(rank.pid).children()
        for worker in found:
            libraries = " ".join(m.path for m in worker.memory_maps())
            assert "PIL" in libraries or "_imaging" in libraries
            assert "libmpi" not in libraries and "torch" not in libraries
            assert not any(name.startswith("OMPI_") for name in worker.environ())
            worker.send_signal(signal.SIGUSR1)  # as Slurm sends to all processes of a step
            worker.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert len(found) == 2 and all(worker.is_running() for worker in found)
        found[0].suspend()
        rank.kill()
        gone, alive = psutil.wait_procs(found, timeout=paced(30))
        assert len(gone) == 2 and not alive


def test_a_killed_process_ends_the_run_with_a_line(images):
    """Oracle: the signal."""
    mine = stream(images, workers=1)
    mine.get(0, 0)
    (worker,) = psutil.Process().children()
    worker.kill()
    with pytest.raises(
        mpikfac.UserError, match=r"ended with code -9; it may have run out of memory"
    ):
        for index in range(4):
            mine.get(0, index)
    mine.close()


# -- runs ------------------------------------------------------------------------------------------


def runs(root):
    path = pictures.noise(root / "images")
    shorten(path / BROKEN)
    assert pack.main([str(path), str(root / "images.h5")]) == 0
    by_name = {"folder": path, "packed": root / "images.h5"}
    for ranks, name, kind, more in (
        (2, "folder", "whole", ()),
        (2, "folder", "parted", ("--max_steps=3",)),
        (2, "folder", "parted", ("--resume=auto", "--data.workers=1")),
        (2, "packed", "packed", ("--data.workers=0",)),
        (2, "packed", "cached", (f"--data.cache={root / 'disk'}",)),
    ):
        data = f"--data.name={name}", f"--data.path={by_name[name]}"
        in_files = f"--data.size={SIZE}", "--data.max_broken_images=1"
        yield ranks, [*QUICK, *data, *in_files, f"--run_dir={root / kind}", *more]
    (root / "mine.py").write_text(OWN)
    yield 2, [*QUICK, f"--data.name={root / 'mine.py'}:data", f"--run_dir={root / 'own'}"]


def weights(run_dir):
    saved = mpikfac.checkpoint.read_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:09d}")
    return {name: saved[name] for name in saved if name.startswith("model/")}


@pytest.mark.slow
def test_a_run_on_a_folder_resumes_exactly_and_a_packed_file_gives_the_same_run(job):
    """Oracle: the uninterrupted run on the folder."""
    expected = weights(job / "whole")
    assert expected
    assert [path.suffix for path in (job / "disk").iterdir()] == [".images"]
    for kind in ("parted", "packed", "cached"):
        found = weights(job / kind)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), kind
    log = (job / "whole" / "log.txt").read_text()
    assert log.count(f"{BROKEN} cannot be decoded, and is replaced: ") == 1


@pytest.mark.slow
def test_a_run_on_a_function_of_a_user_has_the_classes_of_the_labels(job):
    """Oracle: the labels of the function, 0 to 6."""
    assert weights(job / "own")["model/10.bias"].shape == (7,)


def checksums(path, name="folder"):
    return datasets.load(name, str(path), size=SIZE).checksums


def test_a_restart_needs_the_same_images(images, tmp_path):
    """Oracle: the same folder at another path, with other pixels, and with another name."""
    moved = pictures.noise(tmp_path)
    before, now = checksums(images), checksums(moved)
    settings.check_images(before, now)
    settings.check_images({}, now)
    settings.check_images({"images": before["images"]}, now)  # as earlier versions wrote
    name, other = (moved / f"train/ant/0{number}.jpg" for number in range(2))
    content = name.read_bytes()
    name.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="different training images .* of pixels"):
        settings.check_images(before, checksums(moved))
    name.write_bytes(content)
    settings.check_images(before, checksums(moved))
    name.rename(moved / "train/ant/new.jpg")
    with pytest.raises(ValueError, match="different training images .* of images"):
        settings.check_images(before, checksums(moved))


def test_a_packed_file_has_the_checksum_of_all_its_images(images, tmp_path):
    """Oracle: packed files of the folder, and of the folder with another byte in its last image."""
    other = shutil.copytree(images, tmp_path / "other")
    files = [tmp_path / f"{number}.h5" for number in range(3)]
    last = sorted((other / "val").rglob("*.jpg"))[-1]
    packs = [images, images, other]
    last.write_bytes(last.read_bytes() + b"0")
    for source, file in zip(packs, files):
        assert pack.main([str(source), str(file)]) == 0
    first, same, changed = (checksums(file, "packed") for file in files)
    assert first == same
    assert first["pixels"] != changed["pixels"]


def test_lost_images_of_a_sample_have_a_checksum(images, tmp_path):
    """Oracle: `data.max_broken_images` allows lost images: no error, and another checksum."""
    whole = datasets.load("folder", str(images), size=SIZE).train_images
    lost = replace(whole, root=str(tmp_path / "nothing"))
    assert lost.sample != whole.sample and lost.digest == whole.digest
