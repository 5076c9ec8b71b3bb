"""Export a checkpoint's weights and factors for programs without mpikfac. Runs without MPI.

    mpikfac export runs/a --weights model.pt --factors factors.npz

`torch.load("model.pt", weights_only=True)` returns the model's state_dict. `np.load("factors.npz")`
returns the running averages of factors as "<layer>.A" and "<layer>.G".
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

import mpikfac
from mpikfac import files
from mpikfac_apps.cli import checkpoint_at, complain
from mpikfac_apps.inspecting import spectra
from mpikfac_apps.inspecting.options import EXPORT, ExportOptions

MODEL, AVERAGE = "model/", "average/"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files that the options name; return 0, or 2 after printing an error."""
    try:
        options = parse(argv)
        checkpoint = mpikfac.checkpoint.read_checkpoint(checkpoint_at(options.path))
        exports = (
            (options.weights, weights),
            (options.average, average),
            (options.factors, factors),
        )
        contents = {file: content(checkpoint) for file, content in exports if file}
        for file, content in contents.items():
            write(file, content)
            print(f"wrote {file}: {len(content)} tensors of step {checkpoint.step}")
    except (OSError, ValueError, mpikfac.UserError) as error:
        complain("mpikfac export", error)
        return 2
    return 0


def parse(argv: Sequence[str] | None) -> ExportOptions:
    """Return the checked options.

    Raises:
        ValueError: an option is invalid, or no output file is given.
    """
    options = EXPORT.read(argv)
    paths = [file for file in (options.weights, options.average, options.factors) if file]
    if not paths:
        raise ValueError("pass at least one of --weights FILE, --average FILE and --factors FILE")
    if len(set(paths)) < len(paths):
        raise ValueError(f"weights and average need different files, not {options.weights} twice")
    return options


def weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's state_dict."""
    return _tensors(checkpoint, MODEL)


def average(checkpoint: mpikfac.checkpoint.Checkpoint) -> dict[str, Tensor]:
    """Return the state_dict of the model with averaged weights.

    Raises:
        ValueError: the checkpoint has no averaged weights.
    """
    tensors = _tensors(checkpoint, AVERAGE)
    if not tensors:
        raise ValueError(f"{checkpoint.path} has no averaged weights; its run had ema_decay=0")
    return tensors


def _tensors(checkpoint: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return the items whose names start with the prefix, keyed by the rest of their names."""
    names = (name for name in checkpoint if name.startswith(prefix))
    # Clones, because `torch.save` writes all of the memory behind a view.
    return {name.removeprefix(prefix): checkpoint[name].clone() for name in names}


def factors(checkpoint: mpikfac.checkpoint.Checkpoint) -> dict[str, np.ndarray]:
    """Return the factors `[n, n]` of all layers by name; for other shapes, see `spectra.factors`.

    Raises:
        ValueError: the checkpoint has no factors.
    """
    layers = spectra.layers(checkpoint)
    if not layers:
        raise ValueError(f"{checkpoint.path} has no factors, because its run did not store any")
    return {
        f"{layer}.{side}": factor.numpy()
        for layer in layers
        for side, factor in spectra.factors(checkpoint, layer).items()
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to a file atomically: afterwards, the file is either complete or absent.

    Raises:
        ValueError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with io.BufferedWriter(files.writing(partial)) as file:
            SAVE[path.suffix](content, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {files.why(error)}") from error
    finally:
        with suppress(OSError):  # the file is absent, or the storage has failed, as reported above
            partial.unlink()


def save_pt(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write a state_dict for `torch.load`."""
    # Not directly to the file: on a full disk, `torch.save` reports only "unexpected pos".
    image = io.BytesIO()
    torch.save(tensors, image)
    file.write(image.getbuffer())


def save_safetensors(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write a state_dict for `safetensors.torch.load_file`."""
    from safetensors.torch import save

    file.write(save(dict(tensors), {"format": "pt"}))


def save_npz(arrays: Mapping[str, np.ndarray], file: BinaryIO) -> None:
    """Write arrays for `numpy.load`."""
    np.savez(file, allow_pickle=False, **arrays)


Save = Callable[[Mapping[str, Any], BinaryIO], None]

SAVE: dict[str, Save] = {".pt": save_pt, ".safetensors": save_safetensors, ".npz": save_npz}
