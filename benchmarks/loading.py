"""Measure images per second of a rank, from a folder and from packed files, and the memory.

python benchmarks/loading.py --cifar DIR --images 1500

The photos of CIFAR-10 are enlarged to 500x375 pixels, with noise, for files as large as those of
ImageNet. The comparison is plain Pillow in torch's DataLoader: the same crop, the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mpikfac_apps.images import decoding, folder, packed
from mpikfac_apps.images.listing import Listing
from mpikfac_apps.options.options import DataOptions
from mpikfac_apps.problems import datasets
from mpikfac_apps.training.batches import FileBatches

SIZE = 224
TIMED, SKIPPED = 6, 4  # batches in a round
EPOCHS = 12  # of the memory's measurement
STEP = 0.6  # seconds of a step on another device
DECODERS = {"processes": 2, "the rank": 0}
REST = 1.0  # seconds in which batches ahead are finished


class Plain(Dataset):
    """Images of a folder by Pillow, for torch's DataLoader."""

    def __init__(self, found: Listing) -> None:
        self.images = found.train_images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with Image.open(self.images.place(number).path) as image:
            part = decoding.random_crop(image.convert("RGB"), SIZE, (number, time.time_ns()))
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        return pixels, int(self.images.labels[number])


def main() -> None:
    """Print medians over rounds, and the memory after each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar", required=True, help="the folder of CIFAR-10")
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        photos = enlarged(options.cifar, options.images, Path(root) / "photos")
        listing, classes = folder.with_names(str(photos), SIZE)
        sizes = {"photos": sum(f.stat().st_size for f in photos.rglob("*.jpg"))}
        for name, side in (("packed", None), ("packed at 256", 256)):
            began = time.perf_counter()
            sizes[name] = packed.write(listing, classes, Path(root) / f"{name}.h5", side)
            print(f"{name}: {sizes[name] / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
        over = over_epochs(options, photos)
        waits = {name: waiting(options, photos, n) for name, n in DECODERS.items()}
        found = measured(options, photos, Path(root))
        found |= {"megabytes_over_epochs": over, "seconds_of_waiting": waits}
    found |= {"bytes": sizes, "images": options.images, "batch": options.batch}
    found |= {"workers": options.workers, "torch": torch.__version__, "cores": os.cpu_count()}
    found |= {"pillow": Image.__version__, "python": platform.python_version()}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def enlarged(cifar: str, count: int, out: Path) -> Path:
    """Write enlarged photos with noise as a folder of classes; one in ten is for the test."""
    found, draw = datasets.load("cifar10", cifar, 10_000), np.random.default_rng(0)
    for number in range(count):
        pixels = found.train_images[number].permute(1, 2, 0).numpy()
        large = np.asarray(Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC))
        noisy = np.clip(large + draw.normal(0, 8, large.shape), 0, 255).astype(np.uint8)
        label = int(found.train_labels[number])
        place = out / ("val" if number % 10 == 0 else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(place / f"{number:05}.jpg", quality=90)
    return out


def stream(options: argparse.Namespace, name: str, path: Path, workers: int) -> FileBatches:
    """Return the batches of a single rank."""
    data = DataOptions(name=name, augment=True, workers=workers)
    found = datasets.load(name, str(path))
    return FileBatches(found, options.batch, data, seed=0, device=torch.device("cpu"))


def of_stream(mine: FileBatches) -> Iterator[Tensor]:
    """Yield batches, epoch after epoch."""
    step = 0
    while True:
        yield mine.get(*mine.calendar.place(step))[0]
        step += 1


def of_torch(options: argparse.Namespace, photos: Path, workers: int) -> Iterator[Tensor]:
    """Yield batches of torch's DataLoader, epoch after epoch."""
    loader = DataLoader(
        Plain(folder.listed(str(photos))),
        options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )
    while True:
        yield from (images for images, _ in loader)


def over_epochs(options: argparse.Namespace, photos: Path) -> list[float]:
    """Return the MB of a rank and its processes after each of several epochs, training and test."""
    found, taken = datasets.load("folder", str(photos), train_images=96, size=SIZE), []
    data = DataOptions(name="folder", augment=True, workers=options.workers)
    mine = FileBatches(found, options.batch, data, seed=0, device=torch.device("cpu"))
    with closing(mine):
        for epoch in range(EPOCHS):
            for index in range(mine.calendar.at(epoch).steps):
                mine.get(epoch, index)
            for _ in mine.test(options.batch):
                pass
            processes = [psutil.Process(), *psutil.Process().children()]
            taken.append(sum(own_memory(process) for process in processes))
    print(f"after each epoch: MB {', '.join(f'{mb:.0f}' for mb in taken)}")
    return taken


def waiting(options: argparse.Namespace, photos: Path, workers: int) -> list[float]:
    """Return the seconds that each of several steps waits for images, while a device computes."""
    taken = []
    with closing(stream(options, "folder", photos, workers)) as mine:
        for index in range(TIMED + SKIPPED):
            began = time.perf_counter()
            mine.get(*mine.calendar.place(index))
            taken.append(time.perf_counter() - began)
            time.sleep(STEP)
    middle = statistics.median(taken[SKIPPED:])
    print(f"{workers} processes: a step of {STEP} s waits {1e3 * middle:.1f} ms for images")
    return taken[SKIPPED:]


def measured(options: argparse.Namespace, photos: Path, root: Path) -> dict[str, object]:
    """Return images per second and MB by loader, with all loaders in turn in every round."""
    several = options.workers
    ours: dict[str, Callable[[], FileBatches]] = {
        "folder": partial(stream, options, "folder", photos, several),
        "packed": partial(stream, options, "packed", root / "packed.h5", several),
        "packed at 256": partial(stream, options, "packed", root / "packed at 256.h5", several),
        "folder, in the rank": partial(stream, options, "folder", photos, 0),
    }
    loaders: dict[str, Iterator[Tensor]] = {}
    processes: dict[str, list[psutil.Process]] = {}
    opened: list[FileBatches] = []
    for name, make in ours.items():
        before = set(psutil.Process().children())
        opened.append(make())
        loaders[name] = of_stream(opened[-1])
        processes[name] = list(set(psutil.Process().children()) - before)
    for name, workers in (("torch", several), ("torch, in the rank", 0)):
        before = set(psutil.Process().children())
        loaders[name] = of_torch(options, photos, workers)
        next(loaders[name])
        processes[name] = list(set(psutil.Process().children()) - before)
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    memory: dict[str, list[float]] = {name: [] for name in loaders} | {"rank": []}
    for _ in range(options.rounds):
        for name, loader in loaders.items():
            rates[name].append(options.batch * TIMED / timed(loader))
            time.sleep(REST)
            memory[name].append(sum(own_memory(process) for process in processes[name]))
        memory["rank"].append(own_memory(psutil.Process()))
    plain = statistics.median(rates["torch"])
    for name, found in rates.items():
        middle = statistics.median(found)
        spread = f"{min(found):.0f} to {max(found):.0f}"
        held = ", ".join(f"{mb:.0f}" for mb in memory[name])
        print(f"{name:<22}{middle:6.0f} images/s ({spread}), {middle / plain:.2f}; MB {held}")
    print(f"the rank itself: MB {', '.join(f'{mb:.0f}' for mb in memory['rank'])}")
    for mine in opened:
        with closing(mine):
            pass
    return {"images_per_second": rates, "megabytes": memory}


def timed(loader: Iterator[Tensor]) -> float:
    """Return the seconds of `TIMED` batches, after `SKIPPED` batches."""
    for _ in range(SKIPPED):
        next(loader)
    began = time.perf_counter()
    for _ in range(TIMED):
        next(loader)
    return time.perf_counter() - began


def own_memory(process: psutil.Process) -> float:
    """Return the MB that would be free if the process ended."""
    return process.memory_full_info().uss / 1e6


if __name__ == "__main__":
    main()
