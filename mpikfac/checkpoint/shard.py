"""Write a rank's items as an HDF5 file, and read it back; no other module imports h5py.

libhdf5 does not notice damage, and crashes if the disk is full, so it is never used to open files.
For writing, it lays out the file in memory without the values, which plain writes then copy from
tensors to the file. For reading, it parses bytes in memory, after their BLAKE3 digest has been
checked; only `read_around` lets it parse an unchecked file.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import torch
from blake3 import blake3
from h5py import h5d, h5p, h5s, h5t
from torch import Tensor

from mpikfac import files
from mpikfac.checkpoint import durable
from mpikfac.errors import UserError

Value = Tensor | int | float | str

SAME = [
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
FLOAT8 = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
# dtype in the manifest (torch's, or Python's "int" or "float") -> dtype in HDF5
STORED = {name: np.dtype(name) for name in SAME} | {
    **dict.fromkeys(("bool", *FLOAT8), np.dtype("uint8")),
    "bfloat16": np.dtype("uint16"),
    "complex32": np.dtype("uint32"),
    "int": np.dtype("int64"),
    "float": np.dtype("float64"),
}
PAGE = 2**12
PIECE = 2**22  # bytes that are hashed and written at a time, while they are in the cache


def describe(name: str, value: Value) -> dict[str, Any]:
    """Return the item's dtype, shape and size in bytes and, for a number, its value.

    Raises:
        ValueError: the item cannot be stored.
    """
    if not isinstance(name, str) or name in ("", "."):
        raise ValueError(f"item name {name!r} cannot name a dataset")
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            where = f"{value.layout} on {value.device}"
            raise ValueError(f"item {name!r} is {where}; use a dense Tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in STORED:
            raise ValueError(f"item {name!r} has dtype {dtype}; use one of {', '.join(STORED)}")
        return {"dtype": dtype, "shape": list(value.shape), "bytes": value.nbytes}
    if isinstance(value, str):
        return {"dtype": "str", "shape": [], "bytes": len(value.encode())}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"item {name!r} is {value}, which takes more than 64 bits; store a str")
    if isinstance(value, int | float):
        dtype = "int" if isinstance(value, int) else "float"
        return {"dtype": dtype, "shape": [], "bytes": 8, "value": repr(value)}
    raise ValueError(f"item {name!r} is a {type(value).__name__}; use Tensor, int, float or str")


def checksum(value: Value) -> int:
    """Return a checksum of the value; for a tensor, the sum of the elements' bit patterns.

    The sum needs a single pass over memory and no copy, regardless of the tensor's strides.
    """
    if not isinstance(value, Tensor):
        return zlib.crc32(_content(value))
    patterns = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    value = torch.view_as_real(value) if value.is_complex() else value
    # Use DLPack, because `numpy()` would permanently fix the size of the program's tensor.
    bits = np.from_dlpack(value.detach().view(patterns[value.element_size()]).cpu())
    return int(np.add.reduce(bits, axis=None, dtype=max(bits.dtype, np.dtype(np.int32))))


def write_shard(path: Path, items: Mapping[str, Value]) -> dict[str, Any]:
    """Write the items to the file on disk; return `size` in bytes and `digest` (BLAKE3)."""
    digest = blake3()

    def hashed() -> Iterator[bytes | memoryview]:
        for block in _blocks(items):
            digest.update(block)
            yield block

    size = durable.write(path, hashed())
    return {"size": size, "digest": digest.hexdigest()}


def check_shard(path: Path, size: int, digest: str) -> None:
    """Check that the file has the size and the content of the shard that was written.

    Raises:
        UserError: the file is missing, or size or content differ.
    """
    with _opened(path, size) as file:
        actual = hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]
    _compare(path, actual, digest)


def read_shard(path: Path, size: int, digest: str) -> h5py.File:
    """Read the HDF5 file into memory, and check its bytes before libhdf5 parses them.

    Raises:
        UserError: the file is missing, or size or content differ.
    """
    with _opened(path, size) as file:
        content = file.read()
    _compare(path, blake3(content).hexdigest(), digest)
    return h5py.File(io.BytesIO(content), "r")


def read_item(file: h5py.File, name: str, item: Mapping[str, Any]) -> Value:
    """Return the item's value from its dataset in the file.

    Raises:
        ValueError: the dataset does not match the manifest, is not stored in one piece, or lies
            outside the file.
    """
    kind, shape = item["dtype"], tuple(item["shape"])
    link = file.get(_key(name), getlink=True)
    dataset = file[_key(name)] if isinstance(link, h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError("is not a dataset of this file")
    created = dataset.id.get_create_plist()
    if created.get_layout() != h5d.CONTIGUOUS or created.get_external_count():
        raise ValueError("is not stored in one piece")
    expected = np.dtype(f"S{max(1, item['bytes'])}") if kind == "str" else STORED[kind]
    if (dataset.dtype, dataset.shape) != (expected, shape):
        raise ValueError(f"is {dataset.dtype} {dataset.shape}, not {expected} {shape}")
    if dataset.nbytes > file.id.get_filesize():
        raise ValueError("is larger than its file")
    array = dataset[()]
    if kind == "str":
        text: str = array.ljust(item["bytes"], b"\0").decode()  # numpy drops NULs at the end
        return text
    if kind in ("int", "float"):
        number: int | float = array.item()
        return number
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, kind)).reshape(shape)


def read_around(path: Path, large: str) -> tuple[dict[str, Value], int, int]:
    """Return all items of a shard except a large one, and that item's offset and size in bytes.

    The large item need not fit into memory; read parts of it directly from the file. The file's
    digest is not checked, so libhdf5 parses whatever the file contains.

    Raises:
        ValueError: the file is not a shard, or does not store the large item in one piece.
        OSError: the file cannot be read.
    """
    with files.reading(path, links=True) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with h5py.File(file, "r") as shard:
                datasets = {name: shard[name] for name in shard if name != large}
                items = {name: _plain(datasets[name], size) for name in datasets}
                place, length = shard[large].id.get_offset(), shard[large].nbytes
        except (AttributeError, LookupError, OSError, RuntimeError, TypeError) as error:
            reason = files.one_line(error)
            raise ValueError(f"{path} is not an HDF5 file written by mpikfac: {reason}") from error
    if place is None or place + length > size:
        raise ValueError(
            f"{path} is not an HDF5 file written by mpikfac: {large} is not stored in one piece"
        )
    return items, place, length


def _plain(dataset: h5py.Dataset, size: int) -> Value:
    """Return a dataset's value in the dataset's own type; the file has `size` bytes."""
    if dataset.nbytes > size:
        raise LookupError(f"{dataset.name} is larger than its file")
    value = dataset[()]
    if isinstance(value, bytes):
        return value.decode()
    number: Tensor | int | float = value.item() if dataset.shape == () else torch.from_numpy(value)
    return number


class _Image:
    """Behave like a file in memory; pages that HDF5 does not write take no space."""

    def __init__(self) -> None:
        self.size = self._at = 0
        self._pages: dict[int, bytearray] = defaultdict(lambda: bytearray(PAGE))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (self.size if whence == io.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int) -> bytes:
        parts = list(self._parts(count))
        return b"".join(page[part] for page, part in parts)

    def write(self, content: bytes) -> int:
        done = 0
        for page, part in self._parts(len(content)):
            length = part.stop - part.start
            page[part] = content[done : done + length]
            done += length
        self.size = max(self.size, self._at)
        return done

    def truncate(self, size: int) -> None:
        self.size = size

    def flush(self) -> None:
        pass  # h5py calls flush()

    def _parts(self, count: int) -> Iterator[tuple[bytearray, slice]]:
        """Yield the next `count` bytes as slices of pages, and advance the position."""
        stop = self._at + count
        while self._at < stop:
            number, start = divmod(self._at, PAGE)
            end = min(PAGE, start + stop - self._at)
            self._at += end - start
            yield self._pages[number], slice(start, end)


def _blocks(items: Mapping[str, Value]) -> Iterator[bytes | memoryview]:
    """Yield the shard's bytes in order; each value is read from its tensor when needed."""
    image = _Image()
    places = _lay_out(image, items)
    image.seek(0)
    for offset, name in places:
        yield image.read(offset - image.tell())
        content = _content(items[name])
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]
        image.seek(offset + len(content))
    yield image.read(image.size - image.tell())


def _lay_out(image: _Image, items: Mapping[str, Value]) -> list[tuple[int, str]]:
    """Create the HDF5 file without values; return the values' offsets and names, in order."""
    places = []
    plain = h5p.create(h5p.DATASET_CREATE)
    plain.set_layout(h5d.CONTIGUOUS)
    plain.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plain.set_fill_time(h5d.FILL_TIME_NEVER)
    plain.set_obj_track_times(False)  # so that equal items result in equal files
    with h5py.File(image, "w") as file:
        for name in sorted(items):
            dtype, shape = _form(items[name])
            kind, space = h5t.py_create(dtype, logical=True), h5s.create_simple(shape)
            dataset = h5d.create(file.id, _key(name).encode(), kind, space, dcpl=plain)
            if (offset := dataset.get_offset()) is not None:  # None: no elements
                places.append((offset, name))
    return sorted(places)


def _key(name: str) -> str:
    """Return the dataset's name with "/" quoted, so that "a" and the group of "a/b" differ."""
    return quote(name, safe="")


def _form(value: Value) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if isinstance(value, Tensor):
        return STORED[str(value.dtype).removeprefix("torch.")], tuple(value.shape)
    if isinstance(value, str):
        return h5py.string_dtype("utf-8", max(1, len(value.encode()))), ()
    return STORED["int" if isinstance(value, int) else "float"], ()


def _content(value: Value) -> memoryview:
    """Return the value's bytes, without a copy if the value is contiguous in host memory."""
    if isinstance(value, Tensor):
        return np.from_dlpack(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data
    dtype, _ = _form(value)
    plain = value.encode() if isinstance(value, str) else value
    return np.array([plain], dtype).view(np.uint8).data


@contextmanager
def _opened(path: Path, size: int) -> Iterator[io.BufferedReader]:
    try:
        with files.reading(path) as file:
            if (length := os.fstat(file.fileno()).st_size) != size:
                raise UserError(
                    f"{path} is damaged: it has {length} bytes, but {size} were written"
                )
            if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
                raise UserError(f"{path} has {size:,} bytes; this machine's memory has {memory:,}")
            yield file
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {files.why(error)}") from error


def _compare(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise UserError(f"{path} is damaged: its BLAKE3 digest differs from the manifest")
