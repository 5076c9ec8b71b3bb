"""Read text files as bytes, the tokens of a language model, and cut the text into windows.

The default text is available on every machine: the standard library of the running Python.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpikfac import files

TOKENS = 256  # the number of values of a byte
ENDINGS = (".py", ".txt")
LEFT_OUT: frozenset[str] = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test")
)
LIMIT = 2**28  # maximum size of a text in bytes; every rank keeps the text in memory


@dataclass(frozen=True)
class Corpus:
    """A text.

    Attributes:
        tokens: the bytes of all files, one file after the other.
        about: a line with the text's origin, length and checksum, to check that runs use the same
            text.
    """

    tokens: Tensor
    about: str


def read(path: str | None = None) -> Corpus:
    """Return the text of a file, of a folder, or, if the path is None, of the standard library.

    Raises:
        ValueError: the path does not exist, contains no text, or contains more than `LIMIT` bytes.
        OSError: a file cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    chosen = (
        [root] if root.is_file() else files_below(root, LEFT_OUT if path is None else frozenset())
    )
    if (total := sum(file.stat().st_size for file in chosen)) > LIMIT:
        raise ValueError(
            f"data.path={root} has {total:,} bytes of text; at most {LIMIT:,} are supported"
        )
    text = bytearray().join(files.read_bytes(file, LIMIT, links=True) for file in chosen)
    if not text:
        kinds = " or ".join(f"*{ending}" for ending in ENDINGS)
        raise ValueError(f"data.path={root} has no text; pass a file, or a folder of {kinds}")
    origin = (
        f"the standard library of Python {platform.python_version()}" if path is None else str(root)
    )
    size = f"{len(chosen)} files, {len(text):,} bytes, CRC-32 {zlib.crc32(text):08x}"
    return Corpus(torch.frombuffer(text, dtype=torch.uint8), f"text of {origin}: {size}")


def files_below(folder: Path, left_out: frozenset[str]) -> list[Path]:
    """Return the text files below a folder, sorted, except those in folders named in `left_out`."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]  # os.walk skips the rest
        paths += [path for name in names if (path := Path(place, name)).suffix in ENDINGS]
    return sorted(path for path in paths if path.is_file())


def windows(tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return disjoint windows of tokens, and the token that follows each token, both `[n, size]`.

    Both tensors are views of `tokens`. The last tokens, which do not fill a window, are left out.

    Raises:
        ValueError: the text does not fill a window.
    """
    count = (len(tokens) - 1) // size
    if count < 1:
        raise ValueError(
            f"data.size={size}: {len(tokens)} bytes of text do not fill a window; use more text"
        )
    inputs, following = tokens[: count * size], tokens[1 : count * size + 1]
    return inputs.view(count, size), following.view(count, size)
