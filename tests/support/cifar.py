"""CIFAR-10 files with the format of the official archives."""

from __future__ import annotations

import struct

import numpy as np


def python2_pickle(labels: np.ndarray, pixels: np.ndarray, key: bytes = b"labels") -> bytes:
    """Return a pickle with the opcodes that Python 2 wrote in the official files."""

    def text(raw: bytes) -> bytes:
        return b"U" + bytes([len(raw)]) + raw

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    pixels = pixels.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    shape = number(len(labels)) + number(len(pixels) // max(1, len(labels))) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\n"
    array += b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    items = text(b"batch_label") + text(b"training batch 1 of 5")
    items += text(key) + listed + text(b"data") + array
    return b"\x80\x02}(" + items + b"u."
