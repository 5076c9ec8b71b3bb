"""Write weights and factors of a checkpoint as files for programs without mpikfac. No MPI.

    mpikfac export runs/a --weights model.pt --factors factors.npz

`torch.load("model.pt", weights_only=True)` returns the model's state_dict. `np.load("factors.npz")`
returns the running averages of K-FAC's factors as "<layer>.A" and "<layer>.G".
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

import mpikfac
from mpikfac import files
from mpikfac_apps.cli import checkpoint_at, complain, path_of
from mpikfac_apps.inspecting import spectra
from mpikfac_apps.options.command_line import read
from mpikfac_apps.options.fields import positional, read_by

MODEL, AVERAGE = "model/", "average/"


def weights_file(text: str) -> Path:
    """Return the new file in `text`, after a check of the file's kind."""
    path = new_file(text, ".pt", ".safetensors")
    check_package(path)
    return path


def check_package(path: Path) -> None:
    """Return if the package that a file needs is installed.

    Raises:
        ValueError: the package is not installed.
    """
    if path.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            f"{path} needs the package safetensors, which is not installed; .pt needs nothing"
        )


def factors_file(text: str) -> Path:
    """Return the new file in `text`."""
    return new_file(text, ".npz")


def new_file(text: str, *kinds: str) -> Path:
    """Return the path `text` if the suffix is one of `kinds` and no such file exists."""
    path = path_of(text, *kinds)
    if path.exists():
        raise ValueError(f"{path} exists; give another name or delete it")
    return path


@dataclass(frozen=True)
class ExportOptions:
    """Write weights and factors of a checkpoint as files for programs without mpikfac. No MPI.

    Args:
        path: the directory of a checkpoint, or of a run; of a run, the newest checkpoint is taken.
        weights: a new file for the weights of the model, .pt or .safetensors; null for none.
        average: a new file for the averaged weights of a run with `average`, .pt or .safetensors;
            null for none. Running statistics belong to the averages if the run tested the network
            at the step of the checkpoint, for example at the end of the run.
        factors: a new file for the factors A and G of every layer, .npz; null for none.
    """

    path: Path = positional()
    weights: Path | None = read_by(weights_file, None)
    average: Path | None = read_by(weights_file, None)
    factors: Path | None = read_by(factors_file, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; return 2 after printing an error."""
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
        ValueError: a wrong option, or no file to write.
    """
    options = read("mpikfac export", ExportOptions, argv)
    paths = [file for file in (options.weights, options.average, options.factors) if file]
    if not paths:
        raise ValueError("give --weights FILE, --average FILE, --factors FILE or several of them")
    if len(set(paths)) < len(paths):
        raise ValueError(f"weights and average need two files, not {options.weights} twice")
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
        raise ValueError(f"{checkpoint.path} has no averaged weights; its run had average=0")
    return tensors


def _tensors(checkpoint: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return the items with the prefix, by the rest of the name."""
    names = (name for name in checkpoint if name.startswith(prefix))
    # Cloned, because `torch.save` writes the whole memory behind a view.
    return {name.removeprefix(prefix): checkpoint[name].clone() for name in names}


def factors(checkpoint: mpikfac.checkpoint.Checkpoint) -> dict[str, np.ndarray]:
    """Return the factors `[n, n]` by name; `spectra.factors` describes further shapes.

    Raises:
        ValueError: the checkpoint has no factors.
    """
    layers = spectra.layers(checkpoint)
    if not layers:
        raise ValueError(f"{checkpoint.path} has no factors; it is not of K-FAC")
    return {
        f"{layer}.{side}": factor.numpy()
        for layer in layers
        for side, factor in spectra.factors(checkpoint, layer).items()
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to a file on disk; the file is complete or absent.

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
        with suppress(OSError):  # absent, or the storage has failed: the caller is told above
            partial.unlink()


def save_pt(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write a state_dict for `torch.load`."""
    image = io.BytesIO()  # on a full disk, `torch.save` says "unexpected pos"
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
