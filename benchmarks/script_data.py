"""Write small data for public scripts, in the places where the scripts look for data."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from mpikfac_apps.problems.language import corpus

LETTERS = 1_000_000
DRAWINGS, SIZE = 100, 128
NODES, CLASSES, WORDS = 2000, 7, 500


def nothing(place: Path) -> None:
    """Write nothing: the script brings its data, or a stand-in does."""


def letters(place: Path) -> None:
    """Write ASCII text of Python's library as numbers of letters, nine tenths to train."""
    text = corpus.read().tokens.numpy()
    alphabet, tokens = np.unique(text[text < 128][:LETTERS], return_inverse=True)
    names = "train.bin", "val.bin"
    for name, part in zip(names, np.split(tokens.astype(np.uint16), [LETTERS * 9 // 10])):
        part.tofile(place / name)
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(alphabet)}))


def drawings(place: Path) -> None:
    """Write noisy pictures of bright discs and boxes, and masks of both."""
    numbers = np.random.default_rng(0)
    for folder in ("imgs", "masks"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for index in range(DRAWINGS):
        picture = Image.new("RGB", (SIZE, SIZE), colour(numbers, 0, 160))
        mask = Image.new("L", (SIZE, SIZE))
        for shape in numbers.permutation(["ellipse", "rectangle"] * 2):
            left, top = numbers.integers(SIZE, size=2).tolist()
            width, height = numbers.integers(SIZE // 8, SIZE // 2, size=2).tolist()
            box = left, top, left + width, top + height
            getattr(ImageDraw.Draw(picture), shape)(box, fill=colour(numbers, 96, 256))
            getattr(ImageDraw.Draw(mask), shape)(box, fill=255)
        noisy = np.asarray(picture) + numbers.normal(0, 30, size=(SIZE, SIZE, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"imgs/{index}.png")
        mask.save(place / f"masks/{index}.png")


def colour(numbers: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
    """Return a random colour."""
    return tuple(numbers.integers(low, high, size=3).tolist())


def citations(place: Path) -> None:
    """Write a graph whose edges and whose words mostly stay within a class."""
    numbers = np.random.default_rng(0)
    classes = numbers.integers(CLASSES, size=NODES)
    topics = numbers.random((CLASSES, WORDS)) < 0.1
    words = numbers.random((NODES, WORDS)) < np.where(topics[classes], 0.06, 0.02)
    rows = [
        " ".join([str(node), *map(str, words[node].astype(int)), f"class{classes[node]}"])
        for node in range(NODES)
    ]
    (place / "cora.content").write_text("\n".join(rows))
    ends = numbers.integers(NODES, size=(12 * NODES, 2))
    alike = classes[ends[:, 0]] == classes[ends[:, 1]]
    kept = ends[alike | (numbers.random(len(ends)) < 0.05)]
    np.savetxt(place / "cora.cites", kept, fmt="%d")
